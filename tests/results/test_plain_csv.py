"""No cell of a CSV file is a formula."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.results.plain_csv import plain_cell, write_csv
from tests.support.experiments import small_experiment

ROOT = Path(__file__).parents[2]
FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1+1", "\r=1", "-cmd|'/C calc'!A0", "=", "+", "--"]
TEXTS = ["", "ann", "a=b", "-", "-1", "+0.5", "-1e-3", "-inf", "'=1", "1-2", "54.1 +- 2.0"]


@pytest.mark.parametrize("text", FORMULAS)
def test_what_would_be_computed_is_text(text: str) -> None:
    assert plain_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", TEXTS)
def test_what_would_not_stays(text: str) -> None:
    assert plain_cell(text) == text


def test_texts_and_headings_of_tables() -> None:
    out = io.BytesIO()
    table = pa.table({"=name": [*FORMULAS[:2], None], "x": [-1.5, 2.0, None], "n": [-3, 4, 5]})
    write_csv(table, out)
    assert out.getvalue().decode() == '"\'=name","x","n"\n"\'=1+1",-1.5,-3\n"\'+1+1",2,4\n,,5\n'


def test_nothing_else_writes_csv() -> None:
    pattern = re.compile(r"\bcsv\.(write_csv|writer|DictWriter)\(|\.to_csv\(")
    found = {
        str(path.relative_to(ROOT)): len(pattern.findall(path.read_text(encoding="utf-8")))
        for package in ("rayfl", "actors", "algorithms", "cluster")
        for path in (ROOT / package).rglob("*.py")
    }
    # The two that write rows of plain dictionaries use plain_cell.
    assert {path: count for path, count in found.items() if count} == {
        "rayfl/results/plain_csv.py": 1,
        "rayfl/cli/inspect.py": 1,
        "rayfl/tracking/tune_files.py": 1,
    }


def test_clients_with_such_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the data to every CSV file of a run, its report, its figures and its list of clients."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    names = ["=1+1", "+2", "-a", "@b", "plain"]
    rows = {"x": [[float(n % 7), 1.0] for n in range(100)], "y": [n % 2 for n in range(100)]}
    pq.write_table(pa.table(rows | {"client": [names[n % 5] for n in range(100)]}), tmp_path / "mine.parquet")
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    config |= {"dataset": {"name": "parquet", "path": "mine.parquet"}, "partition": "natural"}
    rayfl.run(config, **{"train.rounds": 1})
    listed = CliRunner().invoke(app, ["clients", "run", "--csv"], catch_exceptions=False).output
    for arguments in (["plot", "clients", "run"], ["report", "run"]):
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    files = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.csv")}
    assert {"clients.csv", "progress.csv"} <= {path.name for path in files}
    cells = [cell for text in (listed, *files.values()) for row in csv.reader(io.StringIO(text)) for cell in row]
    assert {"'=1+1", "'-a", "'@b", "plain"} <= set(cells)
    assert [cell for cell in cells if plain_cell(cell) != cell] == []
