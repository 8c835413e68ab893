"""The commands ``rayfl report`` and ``rayfl compare``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfl import terminal
from rayfl.errors import ConfigError

if TYPE_CHECKING:
    from rayfl.experiment import Parts

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

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
) -> None:
    """Write a report on a run, or on several side by side: one HTML page, and its figures as files."""
    from algorithms.registry import METHODS
    from rayfl.report.comparison import compare as compared
    from rayfl.report.loading import load_runs
    from rayfl.report.page import as_table, check_folder, write
    from rayfl.report.several import comparison_table, page_of_runs
    from rayfl.report.single import CLIENTS_FILE, page_of_run

    folder = _folder(runs, out)
    check_folder(folder)
    loaded = load_runs(runs, METHODS)
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


def compare(runs: Runs) -> None:
    """Print runs side by side, with the best marked and tests of the differences."""
    from algorithms.registry import METHODS
    from rayfl.report.comparison import compare as compared
    from rayfl.report.loading import load_runs
    from rayfl.report.several import terminal_table

    if len(runs) < 2:
        raise ConfigError("rayfl compare needs at least two runs; `rayfl report` describes a single one")
    comparison = compared(load_runs(runs, METHODS))
    terminal.out().print(terminal_table(comparison))
    for note in comparison.notes:
        _say(f"note: {note}")


def _folder(runs: list[str], out: Path | None) -> Path:
    from rayfl.storage import Storage

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
    from rayfl.experiment import Parts

    named = _code({key: value for key, value in config.items() if key != "algorithm"})
    if named is not None:
        raise ConfigError(f"a report does not run code that a run's configuration names ({named})")
    # The method has no part in the division of the data, and may be a class that is not there.
    return Parts(load_config(Experiment, {**config, "algorithm": {"name": "fedavg"}}, {}))


def _code(value: Any) -> str | None:
    """The first ``module:name`` in a configuration."""
    if isinstance(value, str):
        return value if _CODE.fullmatch(value) else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return next((found for part in inner if (found := _code(part)) is not None), None)


def _say(text: str) -> None:
    terminal.out().print(text, markup=False, highlight=False, soft_wrap=True)
