"""What goes to a cluster with a run, and what is said of what does not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package
from ray.job_submission import JobDetails, JobStatus

from algorithms.registry import Experiment
from cluster.jobs.ending import why_not_run
from cluster.jobs.jobs import JobOptions, submit
from rayfl.config.loading import load_config
from tests.support.experiments import small_experiment
from tests.support.jobs import FakeClient

METHOD = "from algorithms.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    name: str = 'mine'\n"


def warnings_of(folder: Path, caplog: pytest.LogCaptureFixture, sent: bool = True, **changes: str) -> list[str]:
    """What is said when a run with the data ``data/rows.csv`` is sent, with a folder or without."""
    content = small_experiment(folder, "tiny", "fedavg") | {"dataset": {"name": "parquet", "path": "data/rows.csv"}}
    content |= {"partition": {"name": "natural"}, **changes}
    caplog.clear()
    with caplog.at_level("WARNING", "rayfl"):
        options = JobOptions(ship=False, working_dir=folder if sent else None)
        submit(FakeClient(), load_config(Experiment, content, {}), options)  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records if record.name == "rayfl"]


@pytest.mark.parametrize("without_gitignore", [False, True])
@pytest.mark.parametrize(
    ("place", "patterns"),
    [
        (".gitignore", "# data\n\ndata/\n"),
        (".gitignore", "data\n!data/rows.csv\n"),
        (".gitignore", "data/*\n!data/rows.csv\n"),
        (".gitignore", "*.csv\n"),
        (".gitignore", "/rows.csv\n"),
        (".rayignore", "*.csv\n"),
        ("data/.gitignore", "/rows.csv\n"),
        ("data/.rayignore", "*.parquet\n"),
    ],
)
def test_data_that_ray_leaves_out_of_the_folder_are_named(
    place: str,
    patterns: str,
    without_gitignore: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.csv").write_text("x,y\n")
    (folder / place).write_text(patterns)
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", str(int(without_gitignore)))
    package = tmp_path / "package.zip"
    create_package(str(folder), package, include_gitignore=not without_gitignore)
    with zipfile.ZipFile(package) as archive:
        sent = "data/rows.csv" in archive.namelist()
    said = warnings_of(folder, caplog)
    assert len(said) == (not sent)
    assert all(str(folder / "data" / "rows.csv") in line and str(folder / place) in line for line in said)


def test_a_folder_of_data_and_a_module_that_are_left_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data" / "rows.csv").mkdir(parents=True)
    (tmp_path / "ignored_module.py").write_text(METHOD)
    (tmp_path / ".gitignore").write_text("rows.csv/\nignored_*.py\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = warnings_of(tmp_path, caplog, algorithm="ignored_module:Mine")
    assert ["data/rows.csv" in line or "ignored_module.py" in line for line in said] == [True, True]


def test_data_of_a_folder_that_is_not_sent_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not warnings_of(tmp_path, caplog, sent=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("x,y\n")
    (said,) = warnings_of(tmp_path, caplog, sent=False)
    assert "data/rows.csv lies in the current folder, which is not sent: give --working-dir ." in said


@pytest.mark.parametrize(
    ("status", "code", "message", "lines"),
    [
        (JobStatus.FAILED, None, "runtime_env setup failed: ...\n... No such file or directory: 'pip'\n", 3),
        (JobStatus.FAILED, None, "the job's supervisor has died", 1),
        (JobStatus.FAILED, 2, "exited with code 2, last available logs: ...", 0),
        (JobStatus.SUCCEEDED, 0, "finished", 0),
        (JobStatus.STOPPED, None, "stopped", 0),
        (JobStatus.FAILED, None, None, 0),
    ],
)
def test_of_a_job_that_ray_could_not_run_it_is_said_why(
    status: JobStatus, code: int | None, message: str | None, lines: int
) -> None:
    details = JobDetails(type="SUBMISSION", status=status, entrypoint="", message=message, driver_exit_code=code)
    said = why_not_run(details)
    assert len(said.splitlines()) == lines
    assert ("--no-ship" in said) == (lines == 3)
