"""Jobs that are followed to their end, over connections that may break."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from ray.job_submission import JobDetails, JobSubmissionClient

from cluster.jobs.ending import exit_status, why_not_run
from rayfl.errors import ResourceError

_POLL_S = 1.0
_RECONNECTS = 5


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], object]) -> int:
    """Passes on what a job prints, from its start to its end, and why Ray could not run it.

    Args:
        client: the cluster.
        job: submission id.
        write: gets pieces of the output.

    Returns:
        The exit status of the run: 0, its own, or 143 for a job that was stopped.

    Raises:
        ResourceError: when the connection breaks again and again; the job goes on.
    """
    asyncio.run(_tail(client, job, write))
    details = wait_for_end(client, job)
    if reason := why_not_run(details):
        write(reason)
    return exit_status(details)


async def _tail(client: JobSubmissionClient, job: str, write: Callable[[str], object]) -> None:
    written = 0
    for attempt in range(_RECONNECTS + 1):
        position = 0
        try:
            async for piece in client.tail_job_logs(job):
                # After a broken connection the log comes again from its start.
                new = piece[max(written - position, 0) :]
                position += len(piece)
                written = max(written, position)
                if new:
                    write(new)
            return
        except (RuntimeError, OSError) as error:
            if attempt == _RECONNECTS:
                raise _lost(job, error) from None
            await asyncio.sleep(_POLL_S)


def wait_for_end(client: JobSubmissionClient, job: str, timeout_s: float = math.inf) -> JobDetails:
    """Waits until a job has ended.

    Raises:
        ResourceError: when it has not in time, or the cluster has not answered several times in a row.
    """
    start, failed = time.monotonic(), 0
    while True:
        try:
            details = client.get_job_info(job)
        except (RuntimeError, OSError) as error:
            failed += 1
            if failed > _RECONNECTS:
                raise _lost(job, error) from None
            time.sleep(_POLL_S)
            continue
        failed = 0
        if details.status.is_terminal():
            return details
        if time.monotonic() - start > timeout_s:
            raise ResourceError(f"job {job} is still {details.status} after {timeout_s:g} s; `rayfl status {job}`")
        time.sleep(_POLL_S)


def _lost(job: str, error: Exception) -> ResourceError:
    return ResourceError(f"lost the connection to job {job}, which goes on: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty if it has none."""
    return (str(error).strip().splitlines() or [""])[0]
