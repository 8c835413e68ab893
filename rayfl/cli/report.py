"""The commands ``rayfl report`` and ``rayfl compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.errors import ConfigError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts
    from rayfl.report.comparison import Comparison, Wanted
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
    Literal["test", "validation", "official"],
    typer.Option(
        help="Whose numbers: of test or validation data, or of the official test part, the same for all clients "
        "(evaluation.official_personalized)."
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
_PAPERS = ("markdown", "latex")


class TableFormat(StrEnum):
    """The formats of the tables beside a report."""

    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(report)
    app.command()(compare)


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the report. If left out: report/ in the run's folder; of several runs, here."),
    ] = None,
    formats: Annotated[
        list[TableFormat] | None,
        typer.Option("--format", help="Also write the table of methods so, beside the page. May be repeated."),
    ] = None,
    metrics: Metrics = None,
    models: Models = None,
    split: Split = "test",
    cohort: Cohort = "all",
    phase: Phase = "received",
    as_json: AsJson = False,
) -> None:
    """Write a report on a run, or on several side by side: one HTML page, and its figures as files."""
    from rayfl.data.files.whole import new_file
    from rayfl.report.clients import CLIENTS_FILE
    from rayfl.report.comparison import compare as compared
    from rayfl.report.formats import file_name, formatted
    from rayfl.report.page import as_table, check_folder, write
    from rayfl.report.several import comparison_table, page_of_runs
    from rayfl.report.single import page_of_run

    loaded = _loaded(runs, models, split, cohort, phase)
    wanted = _wanted(loaded, metrics, models)
    folder = _folder([run.uri for run in loaded], out)
    check_folder(folder)
    if metrics and len(loaded) == 1 and not formats:
        raise ConfigError("--metric chooses columns of a table of methods: give several runs, or add --format")
    with _styled():
        if len(loaded) == 1:
            page, clients = page_of_run(_standing(loaded[0], models), dataset_of)
            tables = {} if clients is None else {CLIENTS_FILE: clients}
        else:
            comparison = compared(loaded, wanted)
            page, table = page_of_runs(loaded, comparison), comparison_table(comparison)
            tables = {table.data: as_table(table)}
    texts = {
        file_name(one.value): formatted({loaded[0].dataset: _for(one.value, loaded, wanted)}, one.value)
        for one in formats or ()
    }
    written = write(page, folder, tables)
    for name, text in texts.items():
        with new_file(folder / name) as file:
            file.write(text.encode())
    if as_json:
        files = [folder / name for name in (*tables, *texts)]
        write_json("report", {"report": written, "tables": files, "notes": page.notes})
        return
    for line in (
        *(f"note: {note}" for note in page.notes),
        f"report: {written}",
        *(f"table: {folder / name}" for name in texts),
    ):
        _say(line)


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
        Literal["means", "harm", "costs"],
        typer.Option(
            help="means: of the metrics; harm: who is harmed, the clients below the global model and below local "
            "training, and quantiles over clients; costs: what the runs took."
        ),
    ] = "means",
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
    from rayfl.report.columns import metrics_for
    from rayfl.report.comparison import compare as compared
    from rayfl.report.datasets import compare_by_dataset
    from rayfl.report.formats import formatted
    from rayfl.report.several import terminal_table

    if as_json and format not in ("table", "json"):
        raise ConfigError(f"--json and --format {format}: choose one")
    if metrics and about != "means":
        raise ConfigError(f"--metric chooses columns of --about means; --about {about} has its own: leave one out")
    chosen = "json" if as_json else format
    loaded = _loaded(runs, models, split, cohort, phase)
    wanted = _wanted(loaded, metrics, models, papers=chosen in _PAPERS)
    if len(loaded) < 2 and about == "means":
        raise ConfigError("rayfl compare needs at least two runs; `rayfl report` describes a single one")
    if by_dataset and chosen in _PAPERS and not metrics:
        wanted = replace(wanted, metrics=metrics_for(loaded)[:1])
    comparisons = compare_by_dataset(loaded, wanted) if by_dataset else {loaded[0].dataset: compared(loaded, wanted)}
    if about != "means":
        _print_about(comparisons, about, chosen)
        return
    for name, comparison in comparisons.items():
        if chosen == "table":
            if by_dataset:
                _say(f"{name}:")
            terminal.out().print(terminal_table(comparison))
        for note in comparison.notes:
            where = f"{name}: " if by_dataset else ""
            (_say if chosen == "table" else _warn)(f"note: {where}{note}")
    if chosen != "table":
        terminal.write(formatted(comparisons, chosen))


def _print_about(comparisons: Mapping[str, Comparison], about: Any, chosen: str) -> None:
    from rayfl.report.about import formatted, tables

    if chosen != "table":
        terminal.write(formatted(comparisons, about, chosen))
        return
    made, notes = tables(comparisons, about)
    for name, table in zip(comparisons, made, strict=True):
        if len(comparisons) > 1:
            _say(f"{name}:")
        terminal.out().print(table)
    for note in notes:
        _say(f"note: {note}")


def _loaded(runs: Sequence[str], models: Sequence[str] | None, split: str, cohort: str, phase: str) -> list[Run]:
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


def _wanted(
    runs: Sequence[Run], metrics: Sequence[str] | None, models: Sequence[str] | None, papers: bool = False
) -> Wanted:
    from rayfl.naming.spelling import nearest
    from rayfl.report.columns import columns_of
    from rayfl.report.comparison import Wanted
    from rayfl.runs.rows import PERSONALIZED

    known = columns_of(runs) if metrics else {}
    for name in metrics or ():
        if name not in known:
            raise ConfigError(
                f"--metric {name}: there is no such column{nearest(name, known)}; there are {', '.join(known)}"
            )
    columns = tuple(known[name] for name in dict.fromkeys(metrics or ()))
    rows = tuple(dict.fromkeys(models or ())) or ((PERSONALIZED,) if papers else ())
    return Wanted(columns, rows)


def _for(format: str, loaded: Sequence[Run], wanted: Wanted) -> Comparison:
    """A comparison for a file; a paper's table has each method's personalized model if no row is named."""
    from rayfl.report.comparison import compare as compared
    from rayfl.runs.rows import PERSONALIZED

    papers = format in _PAPERS and not wanted.models
    return compared(loaded, replace(wanted, models=(PERSONALIZED,)) if papers else wanted)


def _standing(run: Run, models: Sequence[str] | None) -> Run:
    """The run, with the row that its page is about."""
    from rayfl.runs.rows import PERSONALIZED

    if models and len(models) > 1:
        raise ConfigError("--model: the page of a single run is about one row; name one")
    name = models[0] if models else ""
    return run.viewed(chosen="" if name in ("", PERSONALIZED, run.own.model) else name)


def _warn(text: str) -> None:
    terminal.err().print(text, markup=False, highlight=False, soft_wrap=True)


def _folder(runs: list[str], out: Path | None) -> Path:
    from rayfl.storage.files import Storage

    if out is not None:
        return out.expanduser()
    own = Storage(runs[0]).local_path if len(runs) == 1 else None
    return Path("report") if own is None else own / "report"


def _styled() -> Any:
    from rayfl.report.drawing import styled

    return styled()


def dataset_of(config: Mapping[str, Any]) -> Parts:
    """Data set and partition of a run's configuration.

    Raises:
        RayflError: they are not there, or opening them would run code that the configuration names.
    """
    from algorithms.registry import Experiment
    from rayfl.config.loading import load_config
    from rayfl.config.own_code import named_code
    from rayfl.experiment.parts import Parts

    # The method has no part in the division of the data, and may be a class that is not there.
    settings = load_config(Experiment, {**config, "algorithm": {"name": "fedavg"}}, {})
    named = named_code(settings, ["dataset", "task"])
    if named:
        raise ConfigError(f"a report does not run code that a run's configuration names ({named[0]})")
    return Parts(settings)


def _say(text: str) -> None:
    terminal.out().print(text, markup=False, highlight=False, soft_wrap=True)
