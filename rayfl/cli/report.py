"""The command ``rayfl report``: writes a page, its figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.cli.report_options import PAPERS, Cohort, Metrics, Models, Phase, Runs, Split, loaded_runs, wanted_of
from rayfl.errors import ConfigError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts
    from rayfl.report.comparison import Comparison
    from rayfl.report.lines import Wanted
    from rayfl.runs.loading import Run


class TableFormat(StrEnum):
    """The formats of the tables beside a report."""

    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(report)


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=at_home,
            help="Folder of the report. If left out: report/ in the run's folder; of several runs, here.",
        ),
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

    loaded = loaded_runs(runs, models, split, cohort, phase)
    wanted = wanted_of(loaded, metrics, models)
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
        terminal.say(line)


def _for(format: str, loaded: Sequence[Run], wanted: Wanted) -> Comparison:
    """A comparison for a file; a paper's table has each method's personalized model if no row is named."""
    from rayfl.report.comparison import compare as compared
    from rayfl.runs.rows import PERSONALIZED

    papers = format in PAPERS and not wanted.models
    return compared(loaded, replace(wanted, models=(PERSONALIZED,)) if papers else wanted)


def _standing(run: Run, models: Sequence[str] | None) -> Run:
    """The run, with the row that its page is about."""
    from rayfl.runs.rows import PERSONALIZED

    if models and len(models) > 1:
        raise ConfigError("--model: the page of a single run is about one row; name one")
    name = models[0] if models else ""
    return run.viewed(chosen="" if name in ("", PERSONALIZED, run.own.model) else name)


def _folder(runs: list[str], out: Path | None) -> Path:
    from rayfl.storage.files import Storage

    if out is not None:
        return out
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
