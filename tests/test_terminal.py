"""Tables are as wide as the terminal, and whole where there is none."""

from __future__ import annotations

import pytest
from rich.table import Table

from rayfl.terminal import out


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a table with one long cell."""
    table = Table("name", "value")
    table.add_row("a" * 70, "b" * 70)
    out().print(table)
    return capsys.readouterr().out.splitlines()


def test_a_pipe_gets_whole_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert any("a" * 70 in line and "b" * 70 in line for line in printed(capsys))


def test_columns_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, printed(capsys))) == 60
