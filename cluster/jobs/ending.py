"""How a job has ended."""

from __future__ import annotations

from ray.job_submission import JobDetails, JobStatus

from cluster.rounds.interrupts import TERMINATED

_NO_PIP = "No such file or directory: 'pip'"
_WITHOUT_PIP = (
    "Ray installs the rayfl that is sent along by the command pip, and the nodes have none on their PATH, as in an "
    "environment that uv has made: add it there (uv pip install pip), or install rayfl there and give --no-ship"
)


def exit_status(details: JobDetails) -> int:
    """Returns the exit status of an ended job's run."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    return TERMINATED if details.status == JobStatus.STOPPED else details.driver_exit_code or 1


def why_not_run(details: JobDetails) -> str:
    """Returns Ray's lines about a job whose process it could not start or has lost; empty for any other job."""
    if details.status != JobStatus.FAILED or details.driver_exit_code is not None or not details.message:
        return ""
    return f"{details.message.rstrip()}\n" + (f"{_WITHOUT_PIP}\n" if _NO_PIP in details.message else "")
