"""Which runs, rows and columns a report, a comparison or a figure is about: options of several commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rayfl.errors import ConfigError

if TYPE_CHECKING:
    from rayfl.report.lines import Wanted
    from rayfl.runs.loading import Run


Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Rows of the tables (global, lambda=0.5, ...; personalized: each method's own); default: all but single "
        "members of a sweep, in Markdown and LaTeX personalized. Of runs of your own methods by an older rayfl it also "
        "names the personalized model. May be repeated.",
    ),
]

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        help="A column of the task: of classification top1, top1_worst5, top1_jain, top5, loss, ece or mce; of others "
        "see docs/tasks.md. May be repeated; the first is tested.",
    ),
]

Split = Annotated[
    Literal["test", "validation", "train", "official"],
    typer.Option(
        help="Whose numbers: of test or validation data, of training data (evaluation.splits), or of the official test "
        "part, the same for all clients (evaluation.official_personalized)."
    ),
]

Cohort = Annotated[
    Literal["all", "selected", "unseen"],
    typer.Option(
        help="all: every client that may train; selected: those sampled in a round; unseen: those held out from "
        "training (evaluation.unseen_clients)."
    ),
]

Phase = Annotated[
    Literal["received", "trained"],
    typer.Option(help="Models as clients received them, or (cohort selected) right after local training."),
]

Runs = Annotated[
    list[str],
    typer.Argument(
        help="Folders of runs: paths or URIs (file, s3, gs). The folder of a sweep or of a reproduction stands for all "
        "of its runs.",
        show_default=False,
    ),
]

PAPERS = ("markdown", "latex")
"""Formats of tables as papers print them."""


def loaded_runs(runs: Sequence[str], models: Sequence[str] | None, split: str, cohort: str, phase: str) -> list[Run]:
    """Reads the runs, as what the options ask for.

    Raises:
        RayflError: a run cannot be read, or has no such row or evaluation.
    """
    from algorithms.registry import METHODS
    from rayfl.report.comparison import check_models
    from rayfl.runs.finding import check_measured, load_runs
    from rayfl.runs.measured import Measured

    if phase == "trained" and cohort != "selected":
        raise ConfigError("--phase trained needs --cohort selected: only a round's cohort is scored after training")
    measured = Measured(split, cohort, phase)  # type: ignore[arg-type]  # typer has looked at the words
    loaded = [run.viewed(measured=measured) for run in load_runs(runs, METHODS, models or ())]
    check_measured(loaded)
    check_models(loaded, models or ())
    return loaded


def wanted_of(
    runs: Sequence[Run], metrics: Sequence[str] | None, models: Sequence[str] | None, papers: bool = False
) -> Wanted:
    """Returns the rows and columns that the options ask for.

    Args:
        runs: which are compared.
        metrics: names of columns; none: those of the runs' task.
        models: names of rows; none: the default ones.
        papers: whether the default is each method's personalized model, as papers print it.

    Raises:
        ConfigError: a run has no such column.
    """
    from rayfl.naming.spelling import nearest
    from rayfl.report.columns import columns_of
    from rayfl.report.lines import Wanted
    from rayfl.runs.rows import PERSONALIZED

    known = columns_of(runs) if metrics else {}
    for name in metrics or ():
        if name not in known:
            lacking = [run.uri for run in runs if name not in columns_of([run])]
            if len(lacking) < len(runs):
                raise ConfigError(
                    f"--metric {name}: not all runs have this column, {', '.join(lacking[:3])} not: leave such runs "
                    f"out, or choose one of {', '.join(known)}"
                )
            raise ConfigError(
                f"--metric {name}: there is no such column{nearest(name, known)}; there are {', '.join(known)}"
            )
    columns = tuple(known[name] for name in dict.fromkeys(metrics or ()))
    rows = tuple(dict.fromkeys(models or ())) or ((PERSONALIZED,) if papers else ())
    return Wanted(columns, rows)
