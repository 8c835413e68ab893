"""Draws a kind of figure and writes it, with its numbers beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfl.data.files.whole import new_file
from rayfl.errors import ConfigError
from rayfl.plots.kinds import check_options, kind_of
from rayfl.plots.partition import DPI, check_format, save_figure
from rayfl.plots.style import paper_style, size_of
from rayfl.results.plain_csv import write_csv
from rayfl.results.schemas import metrics_of
from rayfl.runs.definitions import defined_apart
from rayfl.runs.folder import RunFolder

_log = logging.getLogger("rayfl")


def write_plot(
    name: str, runs: Sequence[RunFolder], destination: Path, *, dpi: int | None = None, size: str = "", **options: Any
) -> Path:
    """Writes a figure, and its numbers under the same name with the ending ``.csv``.

    A warning names the metrics in it that the runs do not define alike, such as two kinds of loss.

    Args:
        name: the kind, one of ``rayfl.plots.kinds.KINDS``.
        runs: the runs, in the order of the legend.
        destination: ``.png``, ``.svg`` or ``.pdf``.
        dpi: dots per inch of a ``.png``; None: 150.
        size: one of ``rayfl.plots.style.SIZES``, with the fonts of papers; empty: for a screen.
        **options: of the kind.

    Returns:
        The CSV file.

    Raises:
        RayflError: for another ending or kind, an option that the kind does not take, and runs that cannot give the
            figure; nothing is written.
    """
    kind = kind_of(name)
    check_format(destination)
    check_options(name, options)
    if dpi is not None and destination.suffix.lower() != ".png":
        raise ConfigError(f"--dpi: {destination.name} is made of lines, not of pixels; give --out a name with .png")
    if dpi is not None and not 30 <= dpi <= 1200:
        raise ConfigError(f"--dpi: {dpi} is not within 30 and 1200")
    if not runs:
        raise ConfigError(f"{name} needs the folder of a run")
    seen = [run.uri for run in runs]
    twice = next((uri for position, uri in enumerate(seen) if uri in seen[:position]), None)
    if twice is not None:
        raise ConfigError(f"the run {twice} is given twice")
    with paper_style(size_of(size) if size else None):
        figure, table = kind.draw(runs, **options)
        save_figure(figure, destination, dpi or DPI)
    numbers = destination.with_suffix(".csv")
    with new_file(numbers) as file:
        write_csv(table, file)
    measured = {metric.name for run in runs for metric in metrics_of(run.rounds)}
    shown = {column: column for column in table.column_names if column in measured}
    for differing, names in defined_apart([run.content for run in runs], shown).items():
        _log.warning(
            "%s: not defined alike, as the runs differ in %s: do not compare these numbers of the figure",
            ", ".join(names),
            differing,
        )
    return numbers
