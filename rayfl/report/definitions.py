"""Marks the columns of a comparison whose numbers are not of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayfl.report.columns import Metric
from rayfl.runs.definitions import defined_apart
from rayfl.runs.loading import Run


def told_apart(runs: Sequence[Run], metrics: Sequence[Metric]) -> tuple[tuple[Metric, ...], list[str]]:
    """Marks the columns whose numbers the runs' options define differently.

    Args:
        runs: which are compared.
        metrics: the columns.

    Returns:
        The columns, and a sentence for each set of options that sets some apart.
    """
    found = defined_apart([run.content for run in runs], {metric.column: metric.measured for metric in metrics})
    apart = {name for names in found.values() for name in names}
    notes = [
        f"{', '.join(names)}: not defined alike, as the runs differ in {options}: no number of "
        f"{'these columns' if len(names) > 1 else 'this column'} is the best or tested"
        for options, names in found.items()
    ]
    return tuple(replace(metric, alike=metric.column not in apart) for metric in metrics), notes
