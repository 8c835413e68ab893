"""How far the clients' updates of the last layer lie apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import RunError
from rayfl.plots.phases import mark_phases
from rayfl.plots.series import seeds_together, series_of
from rayfl.plots.style import draw_curve, legend_below, new_figure, whole_numbers
from rayfl.runs.folder import RunFolder
from rayfl.runs.participation import participants
from rayfl.runs.rows import attendance, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LOGARITHMIC = 2
"""The greatest value by the least from which on the axis is logarithmic: ticks of one that spans less look alike."""


def draw(runs: Sequence[RunFolder]) -> tuple[Figure, pa.Table]:
    """Draws the total variance of the cohort's updates (Grinwald et al., NeurIPS 2024, eqs. 12 and 13) by round.

    Args:
        runs: any whose method has such updates; a band is the sample standard deviation over seeds.

    Raises:
        RunError: for a run without them, saying why.
    """
    rows: list[dict[str, Any]] = []
    for series in series_of(runs):
        sizes = [_cohort_sizes(run) for run in series.runs]
        for round, (value, std) in seeds_together([_variance(run) for run in series.runs]).items():
            rows.append(
                {
                    "series": series.label,
                    "round": round,
                    "update_variance": value,
                    "std_over_seeds": std,
                    "clients": min(size[round] for size in sizes),
                    "seeds": len(series.runs),
                }
            )
    figure = new_figure(4.8, 3.4)
    axes = figure.subplots()
    for position, label in enumerate(dict.fromkeys(row["series"] for row in rows)):
        mine = [row for row in rows if row["series"] == label]
        xs, mean, spread = (np.array([row[c] for row in mine]) for c in ("round", "update_variance", "std_over_seeds"))
        # On a logarithmic axis a band cannot reach 0.
        draw_curve(axes, position, label, xs, mean, spread, (float(mean.min()) / 100, np.inf))
    values = [row["update_variance"] for row in rows]
    if max(values) > _LOGARITHMIC * min(values) > 0:
        _logarithmic(axes)
    mark_phases(axes, runs)
    whole_numbers(axes)
    axes.set(xlabel="round", ylabel="total variance of updates")
    legend_below(figure, axes)
    return figure, pa.Table.from_pylist(rows)


def _logarithmic(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with plain numbers at its ticks."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Writes numbers where the usual one, whose digits are too few, would; formulas are switched off."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.4g}" if super().__call__(x, pos) else ""

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(Plain())
    axes.yaxis.set_minor_formatter(Plain())


def _cohort_sizes(run: RunFolder) -> Counter[int]:
    """Returns how many clients the cohorts had, by round; at least how many where that is not known exactly.

    Rows of a split count only the clients that have samples in it.
    """
    took_part = participants(run)
    return Counter((attendance(run.clients) if took_part is None else took_part)["round"].to_pylist())


def _variance(run: RunFolder) -> dict[int, float]:
    table = where(run.rounds, cohort="selected", phase="trained")
    if not table.num_rows:
        raise RunError(
            f"{run.uri} has no rows of its cohorts: run it with evaluation.cohort_every=1 (it is "
            f"{run.config.evaluation.cohort_every})"
        )
    pairs = zip(table["round"].to_pylist(), table["update_variance"].to_pylist(), strict=True)
    found = {round: value for round, value in pairs if value is not None}
    if not found:
        raise RunError(
            f"{run.uri}: {run.config.algorithm.name} has no updates of a last layer that the server averages, "
            "so its runs have no update_variance"
        )
    return found
