"""Commands of the command line, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from rayfl.cli.entry import app


def command(*arguments: str, status: int = 0) -> str:
    """Returns what a command prints, which must end with this status."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output
