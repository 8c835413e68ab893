"""Commands of the command line, run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from rayfl.cli.entry import app


def command(*arguments: str, status: int = 0) -> str:
    """Returns what a command prints, which must end with this status."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


def leaves() -> list[tuple[str, ...]]:
    """Returns the words of every command that does something, such as ``("data", "list")``."""

    def below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for part, inner in getattr(group, "commands", {}).items():
            yield from below(inner, (*words, part))
        if not hasattr(group, "commands"):
            yield words

    return list(below(get_command(app), ()))
