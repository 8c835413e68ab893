"""Tables are as wide as the terminal, and whole where there is none."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayfl.tracking.terminal import (
    PlainConsole,
    VisibleFormatter,
    err,
    lose_nothing,
    out,
    show_traceback,
    show_warning,
    visible,
    write,
)


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
    lines = printed(capsys)
    assert max(map(len, lines)) == 60
    assert "".join(lines).count("a") == 70 + 2 and "".join(lines).count("b") == 70  # nothing is cut


@pytest.mark.parametrize("width", [1, 20, 40, 60, 79, 80])
def test_a_narrow_terminal_loses_no_column_and_no_digit(width: int) -> None:
    table = Table("method", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("accuracy", "worst\n5 %", "ECE", "clients"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("remarks", min_width=8)
    table.add_row("x" * 30, "57.18^", "12.34", "0.567", "12 of 14", "z" * 30)
    console = PlainConsole(file=io.StringIO(), width=width)
    console.print(Group(table, Text("note")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text.count(part) == 1 for part in ("57.18^", "12.34", "0.567", "12 of 14", "accuracy", "ECE"))
    assert text.count("x") == text.count("z") == 30
    assert width < 60 or max(map(len, text.splitlines())) <= width


EVIL = "a\x1b[31mb\x9b2J\x07\r\u202ec\udcff"
SHOWN = r"a\x1b[31mb\x9b2J\x07\r\u202ec\udcff"
SHOWN_OF_TEXT = SHOWN.replace(r"\x07\r", "")  # which rich leaves out
UNSEEN = set(EVIL) - set("abc[312mJ")


def test_control_characters_are_shown_wherever_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(EVIL, title=EVIL, caption=EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    out().print(table)
    out().print(EVIL)
    err().print(EVIL, style="red")
    found = capsys.readouterr()
    assert not UNSEEN & set(found.out + found.err)
    assert found.out.count(SHOWN) == 5
    assert found.out.count(SHOWN_OF_TEXT) == 1
    assert found.err == f"{SHOWN}\n"
    assert visible("tab\tand\nlines of ünïcode") == "tab\tand\nlines of ünïcode"


def test_columns_are_as_wide_as_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "value")
    table.add_row("\x1b" * 5, "1")
    table.add_row("plain", "2")
    out().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any("\\x1b" * 5 in line for line in lines)


@pytest.mark.parametrize("text", ["[red]a[/red]", "[/nothing]", "[link=file:///etc]x[/link]", ":smile:", "a\\[b]"])
def test_nothing_is_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(text, title=text)
    table.add_row(text)
    out().print(table)
    out().print(text)
    assert capsys.readouterr().out.count(text) == 4


def test_a_terminal_still_gets_styles_and_a_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = PlainConsole(file=written, force_terminal=True, width=40, _environ={"TERM": "xterm"})
    console.print(Text("bold", style="bold"))
    with Live(Text(EVIL), console=console, transient=True):
        console.print("above")
    assert "\x1b[1mbold\x1b[0m" in written.getvalue()
    assert "\x1b[2K" in written.getvalue()  # the view was erased
    assert SHOWN_OF_TEXT in written.getvalue()
    assert "\x9b" not in written.getvalue()


def test_data_for_programs_are_as_they_are_but_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("\x1b[31m,1\n")
    assert capsys.readouterr().out == "\x1b[31m,1\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write("\x1b[31m,1\n")
    assert capsys.readouterr().out == "\\x1b[31m,1\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_escaped_as_in_json(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    text, stream = "± é λ 😀 \udcff", io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    lose_nothing()
    write(json.dumps({"text": text}, ensure_ascii=False))
    out().print("± 😀", soft_wrap=True)
    stream.flush()
    first, _, rest = stream.detach().getvalue().decode(encoding).partition("}")
    assert json.loads(first + "}")["text"] == text
    assert rest.strip() == {"ascii": r"\u00b1 \ud83d\ude00", "latin-1": r"± \ud83d\ude00", "utf-8": "± 😀"}[encoding]


def test_logs_and_tracebacks_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "client %s", ("\x1b[31m",), None)
    assert VisibleFormatter("%(levelname)s %(message)s").format(record) == "WARNING client \\x1b[31m"
    show_traceback(ValueError, ValueError("\x1b[31m"), None)
    assert capsys.readouterr().err == "ValueError: \\x1b[31m\n"
    show_warning("glyph \x1b is missing", UserWarning, "font.py", 3)
    assert capsys.readouterr().err == "font.py:3: UserWarning: glyph \\x1b is missing\n"
