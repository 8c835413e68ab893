"""The command ``rayfl watch``."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.live import Live

from rayfl.cli.inspect import Run
from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(watch)


def watch(
    run: Run,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, with exit status 0 in any state.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run from another shell or machine. Exit status 0 once it is finished, 1 if it has stopped before.

    With --once the status says nothing of the run: what is printed does, as `state` with --json.

    The folder is read and nothing is written. On a terminal the view is that of `rayfl run`; elsewhere there is a line
    for each change, with the time, seconds a round and the time left, or with --json an object.
    """
    from algorithms.registry import Experiment
    from rayfl.runs.watching import standing

    shown: Any = None
    live = None if once or as_json or not terminal.out().is_terminal else Live(console=terminal.out(), transient=True)
    try:
        if live is not None:
            live.start()
        while True:
            found, view = standing(run, Experiment)
            changed = (found.rounds_completed, found.state, found.evaluated)
            if live is not None:
                live.update(view)
            elif changed != shown:
                if as_json:
                    write_json("watch", asdict(found))
                else:
                    terminal.write(f"{view.line()}  {found.state}\n")
            shown = changed
            if once or found.state != "running" or terminal.unread():
                break
            time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(terminal.INTERRUPTED) from None
    finally:
        if live is not None:
            live.stop()
    if live is not None:
        terminal.write(f"{view.line()}  {found.state}\n")
    if found.state == "running" and not once:  # nobody reads on
        raise typer.Exit(terminal.UNREAD)
    if found.state == "stopped" and not once:
        terminal.err().print(
            f"no process works on {run}: `rayfl run {shlex.quote(run)}` goes on", markup=False, soft_wrap=True
        )
        raise typer.Exit(terminal.FAILED)
