"""The command ``rayfl verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(verify)


def verify(
    run: Annotated[str, typer.Argument(help="A run's folder: a path or a URI (file, s3, gs).")], as_json: AsJson = False
) -> None:
    """Check that a run's folder is whole: every commit, file, checksum and table. Exit status 1 if not."""
    from rayfl.runs.verification import verify as verified
    from rayfl.storage.files import Storage

    report = verified(Storage(run))
    if as_json:
        write_json("verify", {"run": run, "whole": not report.problems, **asdict(report)})
        raise typer.Exit(1 if report.problems else 0)
    for problem in report.problems:
        terminal.say(f"problem: {problem}")
    for note in report.notes:
        terminal.say(f"note: {note}")
    rounds = ", ".join(str(commit) for commit in report.commits) or "none"
    read = f"{report.files} files, {report.bytes:,} bytes read; whole commits of rounds: {rounds}"
    terminal.say(f"{len(report.problems)} problems; {read}" if report.problems else f"whole: {read}")
    raise typer.Exit(1 if report.problems else 0)
