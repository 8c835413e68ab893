"""Runs as jobs on a cluster: sent through Ray's Job API, followed, stopped.

A job is named after its run. Submitting the same run again attaches to the job that is under way; after one that has
ended, a new attempt begins, which continues from the run's last commit like any second ``rayfl run``.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from cluster.jobs.following import first_line, wait_for_end
from cluster.jobs.shipping import (
    build_wheel,
    check_modules,
    check_places,
    own_modules,
    warn_of_left_out,
    warn_of_unsent,
)
from cluster.jobs.stopping import stop_wait_s
from rayfl.config.identity import older_fingerprints
from rayfl.config.loading import to_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, ResourceError, RunError

_log = logging.getLogger("rayfl")
_END_OF_CONFIG = "RAYFL_END_OF_CONFIGURATION"
_NO_ADDRESSES = {"RAY_ADDRESS": "", "RAY_API_SERVER_ADDRESS": ""}


@dataclass(frozen=True)
class JobOptions:
    """Options of a job: what goes with a run to the cluster.

    Attributes:
        ship: send this rayfl along; False for a cluster that has it installed.
        working_dir: a folder of the user's own code and files, where the run starts; None: one with the user's own
            modules that the configuration names.
        environment: environment variables of driver and actors.
        packages: requirements that uv installs for the run, on every node, on top of what is there.
    """

    ship: bool = True
    working_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Sequence[str] = ()


@dataclass(frozen=True)
class Submitted:
    """A job of a run.

    Attributes:
        id: Ray's submission id.
        attached: whether it was under way already.
    """

    id: str
    attached: bool


def connect(address: str) -> JobSubmissionClient:
    """A client of the Job API.

    Args:
        address: of the dashboard, ``http://host:8265``.

    Raises:
        ResourceError: when nobody answers there, or refuses; says what a token needs.
    """
    if not address.startswith(("http://", "https://")):
        raise ResourceError(f"{address} is no address of a Ray dashboard: write http://host:8265")
    # It says what goes on at the level INFO, among the lines of the run.
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
    try:
        # Ray prefers its environment variables to the address it is given.
        with mock.patch.dict(os.environ, _NO_ADDRESSES):
            return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise ResourceError(
            f"{address} wants the cluster's token: set RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN or "
            f"~/.ray/auth_token ({first_line(error)})"
        ) from None
    except (ConnectionError, RuntimeError, requests.RequestException) as error:
        raise ResourceError(f"no Ray dashboard at {address}: {first_line(error)}") from None


def submit(client: JobSubmissionClient, config: ExperimentConfig, options: JobOptions) -> Submitted:
    """Starts a run as a job, or finds the job that is running it.

    Raises:
        ConfigError: when a module of the user's own is not sent along, or results would lie in the job's own folder.
        RunError: when a job of the same name is under way with another configuration or folder.
        ResourceError: when the cluster refuses the job.
    """
    check_places(config)
    metadata = _metadata(config)
    attempts = [job for job in jobs(client) if _run_of(job) == config.run_name]
    for job in attempts:
        if not job.status.is_terminal():
            different = differing_keys(job.metadata or {}, config)
            if different:
                raise RunError(
                    f"job {job.submission_id} is running {config.run_name} with another {' and '.join(different)}: "
                    "choose another name, or stop it"
                )
            return Submitted(str(job.submission_id), True)
    # Counted by number, not by how many are left: Ray forgets old jobs.
    last = max((int((job.metadata or {}).get("attempt", 1)) for job in attempts), default=0)
    metadata["attempt"] = str(last + 1)
    name = config.run_name if not last else f"{config.run_name}.attempt-{last + 1}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            client.submit_job(
                entrypoint=_entrypoint(config),
                submission_id=name,
                metadata=metadata,
                runtime_env=_runtime_env(config, options, Path(folder)),
            )
        except (RuntimeError, ValueError, requests.RequestException) as error:
            if "already exists" in str(error):  # somebody was faster by a moment
                return Submitted(name, True)
            raise ResourceError(f"the cluster has refused job {name}: {error}") from None
    return Submitted(name, False)


def _metadata(config: ExperimentConfig) -> dict[str, str]:
    return {
        "run": config.run_name,
        "method": config.algorithm.name,
        "data": config.dataset.name,
        "storage": config.storage_path,
        "fingerprint": config.fingerprint(),
    }


def differing_keys(metadata: Mapping[str, str], config: ExperimentConfig) -> list[str]:
    """Returns in what a job and an experiment differ: fingerprint, storage. An older rayfl may have submitted it."""
    fingerprints = {config.fingerprint(), *(found for found, _ in older_fingerprints(config.identity()))}
    different = {
        "fingerprint": metadata.get("fingerprint") not in fingerprints,
        "storage": metadata.get("storage") != config.storage_path,
    }
    return [key for key, differs in different.items() if differs]


def _entrypoint(config: ExperimentConfig) -> str:
    """A shell command with the whole configuration in it: the job depends on no file of this machine."""
    cluster = config.cluster.model_copy(update={"address": None})
    text = to_yaml(config.model_copy(update={"name": config.run_name, "cluster": cluster}))
    return f"exec python -m rayfl run - <<'{_END_OF_CONFIG}'\n{text}{_END_OF_CONFIG}\n"


def _runtime_env(config: ExperimentConfig, options: JobOptions, folder: Path) -> dict[str, Any]:
    wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s(config.cluster))}
    content: dict[str, Any] = {"env_vars": {**wait, **options.environment}}
    if options.working_dir is not None:
        if not options.working_dir.is_dir():
            raise ConfigError(f"--working-dir: {options.working_dir} is no folder")
        warn_of_left_out(config, options.working_dir)
        content["working_dir"] = str(options.working_dir)
    else:
        warn_of_unsent(config)
    if "PYTHONPATH" not in options.environment:
        if options.working_dir is not None:
            check_modules(config, options.working_dir)
        elif modules := own_modules(config):
            content["working_dir"] = str(_copied(modules, folder / "own"))
            _log.info("sent along: %s", ", ".join(str(path) for path in modules))
    if options.packages:
        content["uv"] = {"packages": list(options.packages)}
    if options.ship:
        content["py_modules"] = [str(build_wheel(folder))]
    return content


def _copied(files: Mapping[Path, Path], folder: Path) -> Path:
    """The folder, with copies of files."""
    for path, file in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / path)
    return folder


def find(client: JobSubmissionClient, run_or_id: str) -> JobDetails:
    """The job of this submission id, or a run's newest.

    Raises:
        RunError: when there is none; names those there are.
    """
    known = jobs(client)
    # The first attempt's id is the run's name: that asks for the run, so for its newest attempt.
    exact = [job for job in known if job.submission_id == run_or_id and _run_of(job) != run_or_id]
    found = exact or [job for job in known if _run_of(job) == run_or_id]
    if not found:
        names = ", ".join(sorted({str(_run_of(job)) for job in known})) or "none"
        raise RunError(f"the cluster has no job of the run {run_or_id}, nor of this id; its runs: {names}")
    return found[-1]


def stop(client: JobSubmissionClient, job: str, timeout_s: float) -> bool:
    """Asks a job to stop after its round, and waits for its end.

    Args:
        client: the cluster.
        job: submission id.
        timeout_s: how long to wait, in seconds.

    Returns:
        Whether there was anything to stop.
    """
    if client.get_job_info(job).status.is_terminal():
        return False
    client.stop_job(job)
    wait_for_end(client, job, timeout_s)
    return True


def jobs(client: JobSubmissionClient) -> list[JobDetails]:
    """All jobs of rayfl that the cluster knows, oldest first."""
    found = [job for job in client.list_jobs() if _run_of(job) is not None]
    return sorted(found, key=lambda job: job.start_time or 0)


def _run_of(job: JobDetails) -> str | None:
    """The run of a job, None for jobs that are none of rayfl's."""
    metadata = job.metadata or {}
    return metadata.get("run") if job.submission_id and "fingerprint" in metadata else None
