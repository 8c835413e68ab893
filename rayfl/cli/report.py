"""The commands ``rayfl report`` and ``rayfl compare``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfl.errors import ConfigError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="The row that is the personalized model, for runs of your own methods that do not say it: those of an "
        "older rayfl. May be repeated.",
    ),
]
Runs = Annotated[list[str], typer.Argument(help="Folders of runs: paths or URIs (file, s3, gs).", show_default=False)]


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
    models: Models = None,
) -> None:
    """Write a report on a run, or on several side by side: one HTML page, and its figures as files."""
    from algorithms.registry import METHODS
    from rayfl.report.comparison import compare as compared
    from rayfl.report.page import as_table, check_folder, write
    from rayfl.report.several import comparison_table, page_of_runs
    from rayfl.report.single import CLIENTS_FILE, page_of_run
    from rayfl.runs.loading import load_runs

    folder = _folder(runs, out)
    check_folder(folder)
    loaded = load_runs(runs, METHODS, models or ())
    with _styled():
        if len(loaded) == 1:
            page, clients = page_of_run(loaded[0], dataset_of)
            tables = {} if clients is None else {CLIENTS_FILE: clients}
        else:
            comparison = compared(loaded)
            page, table = page_of_runs(loaded, comparison), comparison_table(comparison)
            tables = {table.data: as_table(table)}
    for note in page.notes:
        _say(f"note: {note}")
    _say(f"report: {write(page, folder, tables)}")


def compare(runs: Runs, models: Models = None) -> None:
    """Print runs side by side, with the best marked and tests of the differences."""
    from algorithms.registry import METHODS
    from rayfl.report.comparison import compare as compared
    from rayfl.report.several import terminal_table
    from rayfl.runs.loading import load_runs

    if len(runs) < 2:
        raise ConfigError("rayfl compare needs at least two runs; `rayfl report` describes a single one")
    comparison = compared(load_runs(runs, METHODS, models or ()))
    terminal.out().print(terminal_table(comparison))
    for note in comparison.notes:
        _say(f"note: {note}")


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
