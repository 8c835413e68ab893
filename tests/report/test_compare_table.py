"""The table of ``rayfl compare`` on a terminal, and what ``compare`` and ``report`` refuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from algorithms.registry import METHODS
from rayfl.cli.entry import main
from rayfl.report.comparison import compare
from rayfl.report.several import terminal_table
from rayfl.runs.finding import load_runs
from tests.support.commands import command


@pytest.fixture(scope="module")
def single(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("single")
    assert f"report: {out}" in command("report", str(finished / "superfed-mm-0"), "--out", str(out)).replace("\n", "")
    return out


@pytest.fixture(scope="module")
def several(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("several")
    command("report", *(str(run) for run in sorted(finished.iterdir())), "--out", str(out))
    return out


@pytest.fixture(params=["single", "several"])
def report(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def test_compare_prints_the_table(finished: Path) -> None:
    text = command("compare", *(str(finished / f"{method}-0") for method in ("fedavg", "superfed-mm")))
    for part in ("Methods side by side", "+- clients", "^ best of the column", "* chosen on test data", "Paired over"):
        assert part in text


def test_the_table_of_compare_has_room_in_80_columns(finished: Path) -> None:
    runs = load_runs([str(run) for run in sorted(finished.iterdir())], METHODS)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(terminal_table(compare(runs)))
    lines = captured.get().splitlines()
    assert lines[2].split() == ["method", "model", "clients", "seeds", "acc.", "+-", "+-", "worst", "ECE"]
    assert lines[3].split() == ["%", "clients", "seeds", "5", "%"]
    first = compare(runs).lines[0].cells
    numbers = (first["top1"].mean, first["top1"].over_clients, first["top1"].over_seeds, first["top1_worst5"].mean)
    words = lines[5].split()
    assert words[:2] == ["fedavg", "global"]
    assert words[-7:] == ["5", "2", *(f"{number:.2f}" for number in numbers), f"{first['ece'].mean:.3f}"]
    assert "…" not in captured.get()


def test_single_seeds_have_no_column_of_their_spread(finished: Path) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(terminal_table(compare(load_runs([str(finished / "fedavg-0")], METHODS))))
    lines = captured.get().splitlines()
    assert lines[2].split() == ["method", "model", "clients", "seeds", "acc.", "+-", "worst", "ECE"]
    assert lines[3].split() == ["%", "clients", "5", "%"]
    assert len(lines[5].split()) == len(["fedavg", "global", "(own)", "5", "1", "mean", "spread", "worst", "ece"])


def test_long_names_cut_no_number_in_80_columns(finished: Path) -> None:
    runs = [str(finished / f"{method}-{seed}") for method in ("fedavg", "superfed-mm") for seed in (0, 1)]
    found = compare(load_runs(runs, METHODS))
    names = {"method": "remembering:Remembering", "model": "memory", "clients": "12 of 14"}
    lines = [replace(line, **names) for line in found.lines]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(terminal_table(replace(found, lines=lines)))
    rows = [line.rstrip() for line in captured.get().splitlines() if "12 of 14" in line]
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert row.removesuffix("^").endswith(f" {line.cells['ece'].mean:.3f}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "is no run's folder"),
        (["compare", "fedavg-0"], "at least two runs"),
        (["compare", "fedavg-0", "fedavg-0"], "given twice"),
        (["report", "fedavg-0", "nowhere", "--out", "out"], "is no run's folder"),
        (["report", "fedavg-0", "--out", "file"], "is a file"),
    ],
)
def test_what_a_user_can_mend_is_one_message_before_anything_is_written(
    arguments: list[str],
    message: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    places = {"fedavg-0": finished / "fedavg-0", "out": tmp_path / "out", "file": tmp_path / "file"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rayfl", *(str(places.get(argument, argument)) for argument in arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
