"""The command ``rayfl reproduce``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


class Size(StrEnum):
    """How large the runs of a table are."""

    QUICK = "quick"
    PAPER = "paper"


def register(app: typer.Typer) -> None:
    """Adds the command to ``rayfl``."""
    app.command("reproduce")(reproduce)


def reproduce(
    table: Annotated[
        str, typer.Argument(help="A table (superfed-table1) or one setting of it (superfed-table1-mnist-k50).")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="How runs are executed: dataset.root, engine, cluster, clients, storage, tracking."),
    ] = None,
    scale: Annotated[
        Size, typer.Option(help="quick: fewer rounds, epochs and clients; paper: as printed.")
    ] = Size.QUICK,
    out: Annotated[
        str | None, typer.Option(help="Folder of runs and table; default ~/ray_results/reproduce-TABLE-SCALE.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of all runs.")] = None,
    methods: Annotated[str | None, typer.Option(help="Rows, separated by commas; all if left out.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="0:3, or 0,2; default 0, with --scale paper as many as the paper has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run all methods of a paper's table, and print ours beside theirs; the same command continues."""
    from algorithms.registry import Experiment
    from cluster.rounds.interrupts import TERMINATED, Terminated
    from cluster.sweep.reproduce import reproduce as run_all
    from rayfl.reproduction.output import as_arrow, as_text
    from rayfl.reproduction.scaling import Scale
    from rayfl.reproduction.tables import plan_reproduction
    from rayfl.tracking.console import ConsoleProgress

    folder = out or f"~/ray_results/reproduce-{table}-{scale.value}"
    size: Scale = "quick" if scale is Size.QUICK else "paper"
    chosen = [name.strip() for name in methods.split(",")] if methods is not None else None
    planned = plan_reproduction(Experiment, table, folder, size, rounds, chosen, _seeds(seeds), _given(overrides or []))
    try:
        progress = terminal.err() if as_json else terminal.out()
        say = terminal.warn if as_json else terminal.say
        result = run_all(planned, folder, say, lambda: [ConsoleProgress(progress)])
    except (KeyboardInterrupt, Terminated) as stop:
        terminal.err().print("interrupted; the same command continues from the last commit", markup=False)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else terminal.INTERRUPTED) from None
    if as_json:
        failures = [
            {"method": run.method, "setting": run.setting, "seed": run.seed, "reason": reason}
            for run, reason in result.failures.items()
        ]
        cells = as_arrow(planned, result.rows).to_pylist()
        about = {"table": table, "scale": scale.value, "folder": folder}
        write_json("reproduce", {**about, "cells": cells, "failures": failures})
    else:
        for part in as_text(planned, result.rows):
            terminal.say(part) if isinstance(part, str) else terminal.out().print(part)
        terminal.say(f"folder: {folder} (table.md, table.csv, table.parquet, a folder per run)")
    if result.failures:
        for run, reason in result.failures.items():
            terminal.warn(f"failed: {run.method} on {run.setting}, seed {run.seed}: {reason}")
        raise typer.Exit(terminal.FAILED)


def _seeds(text: str | None) -> list[int] | None:
    """Seeds from ``0:3`` or ``0,2``."""
    from rayfl.errors import ConfigError
    from rayfl.sweeps.space import parse_space

    if text is None:
        return None
    space = parse_space([f"seed={text}"])
    found = [] if space.random else [point["seed"] for point in space.points(None, 0)]
    if not found or not all(isinstance(seed, int) and seed >= 0 for seed in found):
        raise ConfigError(f"--seeds {text!r} must look like 0:3 or 0,2,5")
    return list(dict.fromkeys(found))


def _given(overrides: list[str]) -> dict[str, Any]:
    """Values by dotted path."""
    from rayfl.config.overrides import parse_overrides

    return dict(parse_overrides(overrides, "cluster.backend=inline"))
