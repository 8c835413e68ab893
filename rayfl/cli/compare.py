"""The command ``rayfl compare``: prints methods side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rayfl.cli.report_options import PAPERS, Cohort, Metrics, Models, Phase, Runs, Split, loaded_runs, wanted_of
from rayfl.errors import ConfigError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.report.comparison import Comparison


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(compare)


def compare(
    runs: Runs,
    format: Annotated[
        Literal["table", "csv", "markdown", "latex", "json"],
        typer.Option(
            help="table: for a terminal; csv, json: every number in a field of its own; markdown, latex: as "
            "papers print it (LaTeX needs the package booktabs)."
        ),
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    about: Annotated[
        Literal["means", "harm", "costs", "target"],
        typer.Option(
            help="means: of the metrics; harm: who is harmed, the clients below the global model and below local "
            "training, and quantiles over clients; costs: what the runs took; target: what it took until a score was "
            "reached (--target)."
        ),
    ] = "means",
    target: Annotated[
        str | None,
        typer.Option(
            help="Of --about target: the score to reach, such as 80% or 0.8, of the first metric or of --metric."
        ),
    ] = None,
    by_dataset: Annotated[
        bool,
        typer.Option(
            "--by-dataset",
            help="Runs on different data: a column for each data set. Markdown and LaTeX have the first metric, "
            "unless --metric names some.",
        ),
    ] = False,
    metrics: Metrics = None,
    models: Models = None,
    split: Split = "test",
    cohort: Cohort = "all",
    phase: Phase = "received",
) -> None:
    """Print runs side by side, with the best marked and tests of the differences."""
    from rayfl.report.about import subject
    from rayfl.report.columns import metrics_for
    from rayfl.report.comparison import compare as compared
    from rayfl.report.datasets import compare_by_dataset
    from rayfl.report.formats import formatted
    from rayfl.report.reaching import Reaching
    from rayfl.report.several import terminal_table

    if as_json and format not in ("table", "json"):
        raise ConfigError(f"--json and --format {format}: choose one")
    if metrics and about not in ("means", "target"):
        raise ConfigError(f"--metric chooses columns of --about means; --about {about} has its own: leave one out")
    if about == "target" and len(metrics or ()) > 1:
        raise ConfigError("--about target has one --metric")
    if (about == "target") != (target is not None):
        raise ConfigError("--about target and --target SCORE go together: give both, or neither")
    chosen = "json" if as_json else format
    loaded = loaded_runs(runs, models, split, cohort, phase)
    wanted = wanted_of(loaded, metrics, models, papers=chosen in PAPERS)
    if len(loaded) < 2 and about == "means":
        raise ConfigError("rayfl compare needs at least two runs; `rayfl report` describes a single one")
    if by_dataset and chosen in PAPERS and not metrics:
        wanted = replace(wanted, metrics=metrics_for(loaded)[:1])
    comparisons = compare_by_dataset(loaded, wanted) if by_dataset else {loaded[0].dataset: compared(loaded, wanted)}
    if about != "means":
        reaching = None if target is None else Reaching.of(loaded, (wanted.metrics or metrics_for(loaded))[0], target)
        _print_about(comparisons, about, subject(about, reaching), chosen)
        return
    for name, comparison in comparisons.items():
        if chosen == "table":
            if by_dataset:
                terminal.say(f"{name}:")
            terminal.out().print(terminal_table(comparison))
        for note in comparison.notes:
            where = f"{name}: " if by_dataset else ""
            (terminal.say if chosen == "table" else terminal.warn)(f"note: {where}{note}")
    if chosen != "table":
        terminal.write(formatted(comparisons, chosen))


def _print_about(comparisons: Mapping[str, Comparison], about: Any, of: Any, chosen: Any) -> None:
    from rayfl.report.about import formatted, tables

    if chosen != "table":
        terminal.write(formatted(comparisons, about, of, chosen))
        return
    made, notes = tables(comparisons, of)
    for name, table in zip(comparisons, made, strict=True):
        if len(comparisons) > 1:
            terminal.say(f"{name}:")
        terminal.out().print(table)
    for note in notes:
        terminal.say(f"note: {note}")
