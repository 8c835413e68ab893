"""A made-up table on digits, run, continued and written; and what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from typer.testing import CliRunner

import cluster.sweep.reproduce
from rayfl.cli.entry import app
from rayfl.errors import ConfigError, DataError, RunError
from tests.support.transcripts import FOLDER, play

PLACE = ["cluster.backend=inline", "tracking.tensorboard=false"]


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.usefixtures("tiny")
def test_a_table_is_run_compared_and_written_and_a_second_time_only_read(tmp_path: Path) -> None:
    arguments = ["tiny-table1-digits", *PLACE, "--out", str(tmp_path), "--scale", "paper", "--seeds", "0:2"]
    code, text = command(*arguments)
    assert code == 0
    for expected in (
        "run 6/6: superfed_mm on tiny-table1-digits, seed 1",
        "Clients that were scored: 4.",
        "chosen on test data",
    ):
        assert expected in text
    table = pq.read_table(tmp_path / "table.parquet")
    assert table.num_rows == 6  # three methods in the table and in the figure
    assert set(table["seeds"].to_pylist()) == {2}
    assert None not in table["ours"].to_pylist()
    assert csv.read_csv(tmp_path / "table.csv")["method"].to_pylist() == table["method"].to_pylist()
    assert (tmp_path / "table.md").read_text().startswith("# tiny-table1-digits, paper scale")
    runs = sorted((tmp_path / "tiny-table1-digits").iterdir())
    assert len(runs) == 6
    before = {run: (run / "environment.json").read_bytes() for run in runs}
    code, text = command(*arguments, "--json")
    found = json.loads(text.splitlines()[-1])
    assert code == 0 and found["schema"] == "rayfl.reproduce/1" and found["failures"] == []
    assert [cell["ours"] for cell in found["cells"]] == table["ours"].to_pylist()
    assert pq.read_table(tmp_path / "table.parquet") == table
    assert {run: (run / "environment.json").read_bytes() for run in runs} == before  # nothing was started again


@pytest.mark.usefixtures("tiny")
@pytest.mark.slow
def test_the_command_prints_what_is_recorded_and_its_folder_is_compared_as_its_runs(tmp_path: Path) -> None:
    play(FOLDER / "reproduce.txt", tmp_path)


@pytest.mark.usefixtures("tiny")
def test_a_run_that_fails_leaves_a_gap_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = cluster.sweep.reproduce.run_config

    def run_config(config, callbacks):  # type: ignore[no-untyped-def]
        if config.algorithm.name == "superfed":
            raise RunError("no luck")
        return original(config, callbacks)

    monkeypatch.setattr(cluster.sweep.reproduce, "run_config", run_config)
    code, text = command("tiny-table1", *PLACE, "--out", str(tmp_path), "--methods", "fedavg,superfed_mm")
    assert code == 1
    assert "failed: superfed_mm on tiny-table1-digits, seed 0: no luck" in text
    assert "not run" in text
    assert [row["ours"] is None for row in pq.read_table(tmp_path / "table.parquet").to_pylist()] == [False, True]


def test_missing_data_say_how_to_prepare_them_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"nothing was started:(.|\n)*rayfl data prepare mnist"):
        command("superfed-table1-mnist-k50", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["superfed-table1", "--seeds", "log(1,2)"], "must look like 0:3"),
        (["superfed-table1", "--seeds", "a"], "must look like 0:3"),
        (["superfed-table1", "backend"], "must look like cluster.backend=inline"),
        (["superfed-table1", "cluster={"], "not valid YAML"),
        (["superfed-tableA1"], "cannot be reproduced run by run"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(*arguments)


def test_tables_are_listed() -> None:
    result = CliRunner().invoke(app, ["list", "tables"], env={"COLUMNS": "200"})
    assert "superfed-table1 " in result.output
    assert "superfed-tableA1" not in result.output
