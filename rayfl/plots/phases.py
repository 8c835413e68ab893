"""Where a method's second phase begins: SuPerFed's mixing (L), FLOCO's assignment of points (tau)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayfl.config.schema import ExperimentConfig
from rayfl.plots.style import TAU
from rayfl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def second_phase(config: ExperimentConfig) -> tuple[int, str] | None:
    """Returns after how many rounds a method's second phase begins, and the paper's symbol; None without one."""
    algorithm = config.algorithm
    if algorithm.name == "superfed":
        return math.floor(algorithm.start * config.train.rounds + 1e-9), "L"
    if algorithm.name in ("floco", "floco_plus") and algorithm.assignment_round < config.train.rounds:
        return algorithm.assignment_round, TAU
    return None


def mark_phases(axes: Axes, runs: Sequence[RunFolder], named: bool = True) -> None:
    """Draws a dotted line for every second phase of the runs, with its symbol above."""
    found = sorted({phase for phase in (second_phase(run.config) for run in runs) if phase is not None})
    for position, (round, symbol) in enumerate(found):
        axes.axvline(round, color="0.5", linestyle=":", linewidth=1)
        if named:
            # Neighbours lean away from each other.
            side = "center" if len(found) == 1 else ("left" if position else "right")
            axes.annotate(symbol, (round, 1), xycoords=("data", "axes fraction"), ha=side, va="bottom", color="0.35")
