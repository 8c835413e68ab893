"""Draws a kind of figure and writes it, with its numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfl.data.files.whole import new_file
from rayfl.data.partitions.picture import check_format, save_figure
from rayfl.errors import ConfigError
from rayfl.plots.kinds import check_options, kind_of
from rayfl.plots.style import paper_style
from rayfl.results.plain_csv import write_csv
from rayfl.runs.folder import RunFolder


def write_plot(name: str, runs: Sequence[RunFolder], destination: Path, **options: Any) -> Path:
    """Writes a figure, and its numbers under the same name with the ending ``.csv``.

    Args:
        name: the kind, one of ``rayfl.plots.kinds.KINDS``.
        runs: the runs, in the order of the legend.
        destination: ``.png``, ``.svg`` or ``.pdf``.
        **options: of the kind.

    Returns:
        The CSV file.

    Raises:
        RayflError: for another ending or kind, an option that the kind does not take, and runs that cannot give the
            figure; nothing is written.
    """
    kind = kind_of(name)
    check_format(destination)
    check_options(name, list(options))
    if not runs:
        raise ConfigError(f"{name} needs the folder of a run")
    seen = [run.uri for run in runs]
    twice = next((uri for position, uri in enumerate(seen) if uri in seen[:position]), None)
    if twice is not None:
        raise ConfigError(f"the run {twice} is given twice")
    with paper_style():
        figure, table = kind.draw(runs, **options)
        save_figure(figure, destination)
    numbers = destination.with_suffix(".csv")
    with new_file(numbers) as file:
        write_csv(table, file)
    return numbers
