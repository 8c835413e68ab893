"""A cluster that takes jobs and does nothing with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.job_submission import JobDetails, JobStatus


class FakeClient:
    """Stands in for Ray's client of the Job API."""

    def __init__(self, pieces: list[list[str | Exception]] | None = None) -> None:
        self.known: dict[str, JobDetails] = {}
        self.sent: list[dict[str, Any]] = []
        self.wheels: list[str] = []
        self.files: set[str] = set()
        self._pieces = pieces or []

    def submit_job(self, **job: Any) -> str:
        if job["submission_id"] in self.known:
            raise RuntimeError(f"Job with submission_id {job['submission_id']} already exists")
        self.sent.append(job)
        self.wheels += [Path(wheel).name for wheel in job["runtime_env"].get("py_modules", []) if Path(wheel).is_file()]
        folder = Path(job["runtime_env"].get("working_dir", "/nowhere"))
        self.files |= {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
        self.end(job["submission_id"], JobStatus.PENDING, job["metadata"])
        return str(job["submission_id"])

    def end(self, job: str, status: JobStatus, metadata: dict[str, str] | None = None, code: int | None = None) -> None:
        metadata = metadata if metadata is not None else self.known[job].metadata
        start = self.known[job].start_time if job in self.known else len(self.known) + 1
        self.known[job] = JobDetails(
            type="SUBMISSION",
            submission_id=job,
            status=status,
            entrypoint="",
            metadata=metadata,
            start_time=start,
            driver_exit_code=code,
        )

    def list_jobs(self) -> list[JobDetails]:
        return list(reversed(self.known.values()))

    def get_job_info(self, job: str) -> JobDetails:
        return self.known[job]

    def stop_job(self, job: str) -> bool:
        self.end(job, JobStatus.STOPPED)
        return True

    def get_job_logs(self, job: str) -> str:
        return f"what {job} said\n"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for piece in self._pieces.pop(0):
            if isinstance(piece, Exception):
                raise piece
            yield piece
