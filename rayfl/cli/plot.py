"""The command ``rayfl plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rayfl.cli.inspect import Trust
from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.errors import ConfigError
from rayfl.plots.kinds import KINDS
from rayfl.tracking import terminal

_HELP = "Draw a figure of runs, and write its numbers beside it as CSV.\n\nKinds:\n\n" + "\n\n".join(
    f"{name}: {kind.description}{f' ({kind.source})' if kind.source else ''}" for name, kind in KINDS.items()
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(help=_HELP)(plot)


def plot(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs, of sweeps or of reproductions: paths or URIs (file, s3, gs).")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            callback=at_home, help="File to write: .png, .svg or .pdf; default: the kind, .png, in this folder."
        ),
    ] = None,
    x: Annotated[
        str | None, typer.Option(help="curves: rounds, bytes or seconds; default: all three, in a column rounds.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="curves, lambda, clients: top1, top5, loss, ece or mce.")] = None,
    model: Annotated[
        str | None, typer.Option(help="curves, clients, masks: a row of the tables; default: the personalized model.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="test (the default) or validation; curves, clients: also official, stage_1 (...) and, with "
            "evaluation.splits, train; landscape, simplex, masks: also train."
        ),
    ] = None,
    cohort: Annotated[
        Literal["all", "unseen"] | None,
        typer.Option(
            help="curves, clients: all that may train (the default), or unseen: those held out from training."
        ),
    ] = None,
    plane: Annotated[
        str | None, typer.Option(help="landscape: models (through three, the default) or random (around each).")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(help="landscape, simplex, masks: numbers of clients, such as 3,17.")
    ] = None,
    points: Annotated[int | None, typer.Option(help="landscape, simplex: points of the grid along an edge.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="landscape, simplex: at most this many samples; masks: of each client.")
    ] = None,
    dpi: Annotated[int | None, typer.Option(help="Dots per inch of a .png; default: 150.")] = None,
    size: Annotated[
        str,
        typer.Option(
            help="The figure's width and fonts for a paper: icml-column, icml, neurips, iclr, aistats-column, "
            "cvpr-column, cvpr, aaai-column, aaai, ieee-column, ieee or jmlr; default: for a screen."
        ),
    ] = "",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    from algorithms.registry import Experiment
    from rayfl.plots.kinds import check_options, kind_of
    from rayfl.plots.output import write_plot
    from rayfl.runs.finding import runs_in
    from rayfl.runs.folder import open_run

    given: dict[str, Any] = {
        "x": x, "metric": metric, "model": model, "split": split, "cohort": cohort, "plane": plane, "points": points,
        "samples": samples, "clients": None if clients is None else _numbers(clients),
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    kind_of(kind)
    check_options(kind, options)
    destination = Path(f"{kind}.png") if out is None else out
    opened = [open_run(run, Experiment, trust) for given in runs for run in runs_in(given)]
    numbers = write_plot(kind, opened, destination, dpi=dpi, size=size, **options)
    if as_json:
        write_json("plot", {"kind": kind, "runs": runs, "figure": destination, "numbers": numbers})
        return
    terminal.out().print(
        f"{kind} of {len(opened)} run{'s' * (len(opened) > 1)} -> {destination}, {numbers}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--clients: {text!r} must look like 3,17") from None
