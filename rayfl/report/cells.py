"""Cells of tables with values of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl.metrics import Metric
from rayfl.report.blocks import Cell, Mark, number

SEEN_TEST = "* chosen on test data, as some papers do: not a fair estimate"


def unit_of_bytes(most: float) -> tuple[float, str]:
    """Returns how many bytes the largest unit has that is not above a number of bytes, and its name."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((size, name) for size, name in units if most >= size), (1, "bytes"))


def metric_cell(value: float | None, metric: Metric, mark: Mark = "") -> Cell:
    """Returns a cell with a value of a metric; a dash where it is missing."""
    return number(float("nan") if value is None else metric.scale * value, metric.digits, mark)


def spread_cell(row: Mapping[str, Any], metric: Metric, mark: Mark = "") -> Cell:
    """Returns a cell with a metric's mean over clients and their standard deviation."""
    value = row[metric.name]
    if value is None:
        return number(float("nan"), 0, mark)
    return Cell(f"{metric.shown(value)} +- {metric.shown(row[f'{metric.name}_std'])}", metric.scale * value, mark)
