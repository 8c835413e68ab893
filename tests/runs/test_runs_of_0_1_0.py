"""What rayfl 0.1.0 left is read by every command, and not continued: the last bits of steps are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.errors import RunError
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.runs_of_0_1_0 import FOLDER, METHODS, OWN, SUPERFED, experiment

READING = {
    "clients": "clients {run}",
    "clients of one model": "clients {run} --model global --sort top1 --csv",
    "export": "export {run} --client 1 --model global --out {out}/model.safetensors",
    "plot curves": "plot curves {run} --x rounds --model global --out {out}/curves.png",
    "plot clients": "plot clients {run} --model global --out {out}/clients.png",
    "plot variance": "plot variance {run} --out {out}/variance.png",
    "report": "report {run} --out {out}/report",
    "compare": "compare {run} {other}",
    "verify": "verify {run}",
    "diff": "diff {run} {other}",
    "show": "show {run}/config.yaml",
    "replay": "replay {run} --round 2 --client {selected} --whole-round",
    "data stats": "data stats {run}/config.yaml",
}
OWN_ROW = ("report", "compare", "clients")
"""Commands that have to be told the personalized model of a user's own method, which 0.1.0 did not record."""
STATUS = {"diff": {1}, "replay": {0, 1}}
"""There are differences; and on another processor than the run was made on, the last bits may be others."""


@pytest.fixture(params=[SUPERFED, pytest.param(OWN, marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a run."""
    return Path(shutil.copytree(FOLDER / request.param, tmp_path / "runs" / request.param))


def selected(run: Path) -> int:
    rows = pq.read_table(run / "clients.parquet").to_pylist()
    return next(int(row["client"]) for row in rows if row["cohort"] == "selected" and row["round"] == 2)


@pytest.mark.parametrize("what", READING)
def test_every_command_reads_it(what: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (other,) = METHODS.keys() - {run.name}
    values = {"run": run, "other": FOLDER / other, "out": tmp_path / "out", "selected": selected(run)}
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    command = [part.format(**values) for part in READING[what].split()]
    own = OWN in (run.name, other if what == "compare" else "")
    if what in OWN_ROW and own:
        assert "does not say which row is the personalized model" in str(CliRunner().invoke(app, command).exception)
        command += ["--model", "memory"]
    if what == "export" and own:
        command += ["--trust"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code in STATUS.get(what, {0}), (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.output.strip() or what == "report"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_it_is_whole_and_says_what_is_not_on_record(run: Path) -> None:
    report = verify(Storage(str(run)))
    assert (report.problems, report.commits) == ([], [1, 2])
    assert any("SHA-256 of config.yaml: not recorded" in note for note in report.notes)


def test_it_is_not_continued_in_other_bits(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "commits").iterdir()}
    with pytest.raises(
        RunError, match=r"was begun by rayfl 0\.1\.0 or before, and it would not go on as it began: local"
    ):
        rayfl.run(experiment(tmp_path / "runs", run.name))
    assert {path: path.read_bytes() for path in (run / "commits").iterdir()} == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
