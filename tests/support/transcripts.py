"""Sessions at a terminal: commands, what they print, and their exit statuses, as tests/cli/transcripts has them.

A line that begins with ``$ `` is a command. The lines up to the next one are what it prints on standard output and
standard error together; ``...`` stands for any text, and blanks are all alike. A line ``[status 1]`` at their end says
the exit status, if it is not 0. ``~`` is the home folder.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from rayfl.cli.entry import main

FOLDER = Path(__file__).parents[1] / "cli" / "transcripts"
_COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_STATUS = re.compile(r"^\[status (\d+)\]\n\s*\Z", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command of a session.

    Attributes:
        words: of the command line.
        printed: what it prints, with ``...`` for any text.
        status: its exit status.
    """

    words: tuple[str, ...]
    printed: str
    status: int


def steps(file: Path) -> list[Step]:
    """The commands of a session in order."""
    found = []
    for command, printed in _COMMAND.findall(file.read_text(encoding="utf-8")):
        status = _STATUS.search(printed)
        text = printed[: status.start()] if status else printed
        found.append(Step(tuple(shlex.split(command)), text, int(status[1]) if status else 0))
    return found


def play(file: Path, home: Path) -> None:
    """Runs a session in the current folder, and fails where a command prints or ends otherwise."""
    for step in steps(file):
        words = [word.replace("~", str(home)) for word in step.words]
        status, printed = said(words)
        printed = printed.replace(str(home), "~")
        rules = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if status != step.status or not doctest.OutputChecker().check_output(step.printed, printed, rules):
            lines = difflib.unified_diff(step.printed.splitlines(), printed.splitlines(), file.name, "printed", n=1)
            raise AssertionError("\n".join([f"$ {shlex.join(step.words)}", f"[status {status}]", *lines]))


def said(words: list[str]) -> tuple[int, str]:
    """The exit status of a command and what it prints, in lines of 100 characters."""
    written, status = io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict("os.environ", {"COLUMNS": "100"}),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
    ):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return status, written.getvalue()
