from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayfl import __main__ as start
from rayfl.cli.entry import app, main
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage

TINY = [
    "dataset=digits",
    "partition={name: classes, num_clients: 5, classes_per_client: 2}",
    "model={name: two_nn, hidden: [8]}",
    "train={rounds: 2, clients_per_round: 2, local_epochs: 1, batch_size: 50}",
    "cluster.backend=inline",
    "tracking.tensorboard=true",
]


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


def test_run_prints_the_table_and_where_everything_is_and_runs_again_at_once(tmp_path: Path) -> None:
    code, text = command("run", *TINY, f"storage_path={tmp_path}", "name=tiny")
    assert code == 0
    for expected in ("global", "lambda=0.5", "by validation", "by test *", "worst 5 %", "ECE", "tensorboard --logdir"):
        assert expected in text
    folder = tmp_path / "tiny"
    assert {"config.yaml", "rounds.parquet", "clients.parquet", "commits", "rayfl.log"} <= {
        p.name for p in folder.iterdir()
    }
    assert list(folder.glob("events.out.tfevents.*"))
    before = (folder / "clients.parquet").read_bytes()
    code, again = command("run", str(folder / "config.yaml"))
    assert code == 0
    assert "by validation" in again
    assert (folder / "clients.parquet").read_bytes() == before


def test_a_folder_of_another_run_is_refused_naming_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("run", *TINY, f"storage_path={tmp_path}", "name=tiny")[0] == 0
    table = (tmp_path / "tiny" / "rounds.parquet").read_bytes()
    arguments = ["rayfl", "run", *TINY, f"storage_path={tmp_path}", "name=tiny", "train.lr=0.5"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "train.lr was 0.01, now 0.5" in capsys.readouterr().err.replace("\n", "")
    assert (tmp_path / "tiny" / "rounds.parquet").read_bytes() == table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nonsense"], "neither a file nor a preset"),
        (["run", "train.lr=x"], "train.lr"),
        (["run", "train.clients_per_round=21"], "only 20 clients"),
        (["run", "partition=natural"], "partition.name"),
        (["run", "dataset={name: leaf, path: nowhere.parquet}", "partition=natural", "holdout={}"], "nowhere.parquet"),
        (["run", "dataset={name: mnist, root: /nowhere}"], "/nowhere"),
        (
            ["run", "algorithm=floco", "algorithm.simplex_dimension=30", "algorithm.assignment_round=5"],
            "simplex_dimension",
        ),
        (["run", "algorithm=scaffold", "train.momentum=0.5"], "momentum"),
        (["run", "model=char_lstm"], "char_lstm"),
        (["data", "import-leaf", "femnist", "/nowhere"], "/nowhere"),
    ],
)
def test_what_a_user_can_mend_is_one_message_before_any_actor_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage = [f"storage_path={tmp_path}"] if arguments[0] == "run" else []
    monkeypatch.setattr(sys, "argv", ["rayfl", *arguments, *storage])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    arguments = [*TINY, f"storage_path={tmp_path}", "name=tiny", "train.rounds=12"]
    started = subprocess.Popen(
        [sys.executable, "-m", "rayfl", "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    commits = CommitStore(Storage(str(tmp_path / "tiny")))
    while started.poll() is None:
        latest = commits.latest()
        if latest is not None and latest.rounds_completed >= 3:
            break
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "the same command continues from the last commit" in errors
    assert "Traceback" not in errors
    stopped = commits.latest()
    assert stopped is not None
    code, text = command("run", *arguments)
    assert code == 0
    assert f"continues after round {stopped.rounds_completed}" in text


def test_list_and_show() -> None:
    code, text = command("list")
    assert code == 0
    for name in ("scaffold", "fedphp", "digits", "pathological", "char_lstm"):
        assert name in text
    assert "quickstart" in command("list", "presets")[1]
    assert command("list", "methods") == command("list", "algorithms")
    code, text = command("list", "models")
    assert "two_nn" in text
    assert "scaffold" not in text
    code, text = command("show", "superfed")
    assert "Connecting Low-Loss Subspace" in text
    assert "nu (beta)" in text
    code, text = command("show", "quickstart", "train.rounds=7")
    assert code == 0
    assert "rounds: 7" in text


def test_import_leaf_and_stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    for split, count in (("train", 4), ("test", 2)):
        folder = tmp_path / "leaf" / split
        folder.mkdir(parents=True)
        data = {"x": [[i / 255] * 784 for i in range(count)], "y": [1] * count}
        content = {"users": ["w1"], "num_samples": [count], "user_data": {"w1": data}}
        (folder / "a.json").write_text(json.dumps(content))
    code, text = command("data", "import-leaf", "femnist", str(tmp_path / "leaf"))
    assert code == 0
    assert "1 clients" in text
    assert pq.read_table(tmp_path / "femnist.parquet").num_rows == 6
    code, text = command("data", "stats", "femnist", "holdout.validation=0.25")
    assert code == 0
    assert "validation samples" in text
    tiny = ["model={name: two_nn, hidden: [4]}", "train={rounds: 1, clients_per_round: 1}", "cluster.backend=inline"]
    code, text = command("run", "femnist", *tiny, f"storage_path={tmp_path}", "name=natural")
    assert code == 0
    code, again = command("run", str(tmp_path / "natural" / "config.yaml"))
    assert code == 0
    assert again.splitlines()[-6:] == text.splitlines()[-6:]


def test_ctrl_c_while_modules_are_imported_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []

    class Entry:
        @property
        def main(self) -> Callable[[], None]:
            handlers.append(signal.getsignal(signal.SIGINT))
            return self.interrupted

        def interrupted(self) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "rayfl.cli.entry", Entry())
    monkeypatch.setattr(sys, "argv", ["rayfl", "list"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for ignored in (False, True):
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            with pytest.raises(SystemExit) as end:
                start.main()
            assert end.value.code == 130
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # while the process ends
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.slow
def test_further_interrupts_do_not_change_how_a_command_ends() -> None:
    script = (
        "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT); "
        "sys.argv = ['rayfl', 'show', 'nothing']; from rayfl.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr


def test_import_is_quick_and_pulls_in_no_ray() -> None:
    script = "import sys, rayfl.models.zoo; assert not {'ray', 'cluster', 'torchvision'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True)
    script = "import sys, rayfl; assert 'torch' not in sys.modules; assert rayfl.__version__"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_package_of_the_same_name_in_front_is_refused(tmp_path: Path) -> None:
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("")
    failed = subprocess.run(
        [sys.executable, "-c", "import rayfl"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert failed.returncode != 0
    assert "rename or move that one" in failed.stderr
    assert str(tmp_path / "actors") in failed.stderr
