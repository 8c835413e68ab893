"""The command ``rayfl fork``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from rayfl.cli import completion
from rayfl.cli.inspect import Run
from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(fork)


def fork(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options of the new run, such as train.lr=0.001 train.rounds=200.", autocompletion=completion.overrides
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the new run, whose folder is made beside the other.")] = ...,  # type: ignore[assignment]
    round: Annotated[int | None, typer.Option(help="Begin after this round; default: the newest commit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Begin a new run from a commit of another one, which stays as it is.

    Code that the configuration names is imported.
    """
    from cluster.rounds.forking import fork as forked
    from rayfl.experiment.parts import Parts

    config, begun = forked(run, name, round, overrides or [])
    folder = Parts(config).storage
    place = folder.local_path or folder.uri
    if as_json:
        write_json("fork", {"folder": str(place), "round": begun, "rounds": config.train.rounds})
        return
    terminal.say(
        f"{place} begins after round {begun} of {run}, and has {config.train.rounds} rounds\n"
        f"go on: rayfl run {shlex.quote(str(place))}",
    )
