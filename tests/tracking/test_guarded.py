"""What follows a run is least important: it never ends one, and a full disk is a warning that names the file."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

import cluster.rounds.log_file
import rayfl
from cluster.rounds.log_file import buffered_log, log_file
from rayfl.errors import ConfigError, RunError
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from rayfl.tracking.callback import Callback
from rayfl.tracking.guarded import Guarded
from rayfl.tracking.timings import read_timings
from rayfl.tracking.tune_files import read_results
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.tracking.test_trackers import calls as calls
from tests.tracking.test_tracking import info

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def experiment(folder: Path, **tracking: Any) -> dict[str, Any]:
    return small_experiment(folder, "run", "scaffold", backend="inline") | {"tracking": tracking}


def full(*arguments: Any, **named: Any) -> Any:
    raise FULL


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# The thread in which TensorBoard writes ends by the error, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["at once", "later"])
def test_tensorboards_disk_may_be_full(
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hook = threading.excepthook
    write, times = RecordWriter.write, []

    def failing(self: RecordWriter, data: bytes) -> None:
        times.append(len(data))
        if when == "at once" or len(times) > 30:
            raise FULL
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", failing)
    assert rayfl.run(experiment(tmp_path, tensorboard=True)).rounds_completed == 4
    (said,) = warnings(caplog)
    assert f"{tmp_path}/run/events.out.tfevents.* lacks something from here on" in said
    assert "No space left on device" in said
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook == hook


@pytest.mark.parametrize("name", ["timings.jsonl", "costs.jsonl", "environment.json", "result.json", "progress.csv"])
@pytest.mark.two_cases
def test_none_of_the_files_beside_the_tables_ends_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = Storage.write

    def failing(self: Storage, path: str, data: bytes) -> None:
        if path == name:
            raise RunError(f"cannot write {self.uri}/{path}: No space left on device")
        write(self, path, data)

    monkeypatch.setattr(Storage, "write", failing)
    assert rayfl.run(experiment(tmp_path, tensorboard=False)).rounds_completed == 4
    (said,) = warnings(caplog)
    assert f"(cannot write {tmp_path}/run/{name}: No space left on device); the run goes on" in said


def test_services_that_fail_end_no_run(
    calls: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow
    import wandb

    monkeypatch.setattr(wandb, "init", full)
    monkeypatch.setattr(mlflow, "log_metrics", full)
    services = {"wandb": {"enabled": True}, "mlflow": {"enabled": True}}
    assert rayfl.run(experiment(tmp_path, tensorboard=False, **services)).rounds_completed == 4
    assert [said.partition(" lacks")[0] for said in warnings(caplog)] == ["Weights & Biases", "MLflow"]
    assert [name for name, _ in calls if name in ("log", "end_run")] == ["end_run"]


def test_a_listener_that_has_not_started_hears_only_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        heard: list[str]

        def on_start(self, run: Any) -> None:
            self.heard = ["start"]
            raise ValueError

        def on_round(self, rounds_completed: int, cohort: Any, seconds: float) -> None:
            self.heard.append("round")

        def on_end(self, rounds_completed: int) -> None:
            self.heard.append("end")
            raise ValueError("two\nlines")

    broken = Broken()
    guarded = Guarded(broken, "its file")
    guarded.on_start(info())
    guarded.on_round(1, [0], 0.1)
    guarded.on_end(1)
    assert broken.heard == ["start", "end"]
    assert warnings(caplog) == ["its file lacks something from here on (ValueError); the run goes on"]


def test_every_event_is_passed_on() -> None:
    heard: list[str] = []

    class Listening(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                heard.append(name)
            return object.__getattribute__(self, name)

    guarded = Guarded(Listening(), "nothing")
    guarded.on_start(info())
    heard.clear()
    events = [name for name in dir(Callback) if name.startswith("on_")]
    arguments: dict[str, tuple[Any, ...]] = {
        "on_start": (info(),),
        "on_round": (1, [0], 0.1),
        "on_phases": (1, {}),
        "on_costs": (1, {}),
        "on_evaluation_progress": (1, 2),
        "on_evaluation": ([],),
        "on_scores": (1, "all", "received", {}),
        "on_commit": (1,),
        "on_failure": ("", 1),
        "on_early_end": (1, ""),
        "on_end": (1,),
    }
    for event in events:
        getattr(guarded, event)(*arguments[event])
    assert heard == events


def test_listeners_of_the_user_still_end_a_run(tmp_path: Path) -> None:
    class Mine(Callback):
        def on_round(self, rounds_completed: int, cohort: Any, seconds: float) -> None:
            raise FULL

    with pytest.raises(OSError, match="No space left"):
        rayfl.run(experiment(tmp_path, tensorboard=False), callbacks=[Mine()])


@pytest.mark.parametrize("given", [print, [print], Callback, Callback()])
def test_what_is_no_list_of_callbacks_is_refused_before_the_start(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needed is a list of objects whose class is a rayfl\.Callback"):
        rayfl.run(experiment(tmp_path), callbacks=given)
    assert not (tmp_path / "run").exists()


def test_warnings_are_shown_in_a_program_that_configures_no_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("rayfl"), "propagate", False)  # pytest's handlers are the root's
    config = experiment(tmp_path, tensorboard=False)
    rayfl.run(config | {"train": config["train"] | {"rounds": 1, "schedule": {"name": "linear", "warmup": 1}}})
    assert "WARNING: train.schedule: the warm-up" in capsys.readouterr().err
    assert not logging.getLogger("rayfl").handlers


def test_results_are_whole_again_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = rayfl.tracking.tune_files.open_to_append

    class Half:
        def __init__(self, path: Path) -> None:
            self._file = real(path)

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, text: str) -> None:
            self._file.write(text[: len(text) // 2])
            raise FULL

    def once(path: Path) -> Any:
        opened.append(path)
        return Half(path) if len(opened) == 1 else real(path)

    monkeypatch.setattr("rayfl.tracking.tune_files.open_to_append", once)
    rayfl.run(experiment(tmp_path, tensorboard=False))
    assert opened
    assert [line["training_iteration"] for line in read_results(Storage(str(tmp_path / "run")))] == [1, 2, 3, 4]


def test_the_logs_disk_may_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster.rounds.log_file, "open_to_append", lambda path: open("/dev/full", "a"))  # noqa: SIM115
    assert rayfl.run(experiment(tmp_path, tensorboard=True)).rounds_completed == 4
    logging.getLogger("rayfl").warning("afterwards")
    assert sum("rayfl.log lacks lines from here on" in said for said in warnings(caplog)) <= 1
    with buffered_log() as early, log_file(Storage(str(tmp_path / "run")), early):
        for _ in range(3):
            logging.getLogger("rayfl").info("a line")
    said = [text for text in warnings(caplog) if "rayfl.log lacks lines from here on" in text]
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_log_that_cannot_be_opened_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = experiment(tmp_path, tensorboard=False)
    rayfl.run(config | {"train": config["train"] | {"rounds": 1}, "name": "other"})
    (tmp_path / "other" / "rayfl.log").unlink()
    (tmp_path / "other" / "rayfl.log").mkdir()
    rayfl.run(config | {"train": config["train"] | {"rounds": 1}, "name": "other"})
    assert f"cannot write {tmp_path}/other/rayfl.log: Is a directory; this run has no log" in caplog.text


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four mebibytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount file systems")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize(
    "room", [40_000, *(pytest.param(room, marks=pytest.mark.slow) for room in (110_000, 130_000)), 150_000]
)
@pytest.mark.first_case
def test_a_full_disk_ends_a_run_with_the_commits_own_error(
    room: int, disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * (4 * 2**20 - room))
    config = experiment(disk, tensorboard=True)
    with pytest.raises(RunError, match=rf"^cannot write {disk}/run/commits/.*: No space left on device$"):
        rayfl.run(config)
    ballast.unlink()
    rayfl.run(config)
    rayfl.run(small_experiment(tmp_path, "calm", "scaffold", backend="inline"))
    assert_same(outcome(tmp_path / "calm"), outcome(disk / "run"))
    assert verify(Storage(str(disk / "run"))).problems == []
    assert len(read_timings(Storage(str(disk / "run")))) >= 1
