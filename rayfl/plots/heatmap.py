"""FLOCO's sensitivity to when clients get their points (tau) and how far around them they train (rho)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.plots.metrics import need_accuracy
from rayfl.plots.series import need_methods, need_same_but, series_of
from rayfl.plots.style import RHO, SEQUENTIAL, TAU, ink_on, new_figure
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Split
from rayfl.runs.rows import last_of_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = {"local": None, "global": "global"}
"""The rows of the panels; None: the personalized model."""


def draw(runs: Sequence[RunFolder], split: Split = "test") -> tuple[Figure, pa.Table]:
    """Draws the mean accuracy over all clients after the last round: the clients' models left, the global one right.

    Args:
        runs: of FLOCO or FLOCO+, which differ in tau, rho and seeds only; cells are means over seeds.
        split: ``validation`` or ``test``.

    Raises:
        RayflError: for runs of other methods, runs that differ in anything else, and fewer than two cells.
    """
    need_accuracy(runs, "the figure heatmap")
    need_methods(runs, ["floco", "floco_plus"], "heatmap")
    need_same_but(runs, ["algorithm.assignment_round", "algorithm.radius"], "heatmap")
    rows = []
    for series in series_of(runs):
        algorithm = series.config.algorithm
        row: dict[str, Any] = {"tau": algorithm.assignment_round, "rho": algorithm.radius}
        for panel, model in _PANELS.items():
            last = last_of_seeds(series.runs, model, split)
            row[f"{panel}_top1"] = float(np.mean([found["top1"] for found in last]))
            row["clients"] = min(found["clients"] for found in last)
        rows.append(row | {"seeds": len(series.runs)})
    if len(rows) < 2:
        raise ConfigError(
            "heatmap needs runs that differ in algorithm.assignment_round (tau) or algorithm.radius (rho)"
        )
    taus, rhos = (sorted({row[column] for row in rows}) for column in ("tau", "rho"))
    figure = new_figure(1.6 + 1.6 * len(rhos), 1.2 + 0.7 * len(taus))
    for axes, panel in zip(figure.subplots(1, 2, sharey=True), _PANELS, strict=True):
        cells = np.full((len(taus), len(rhos)), np.nan)
        for row in rows:
            cells[taus.index(row["tau"]), rhos.index(row["rho"])] = 100 * row[f"{panel}_top1"]
        _panel(axes, cells, taus, rhos)
        axes.set(title=f"{panel} accuracy (%)", xlabel=RHO)
        if panel == "local":
            axes.set_ylabel(TAU)
    return figure, pa.Table.from_pylist(rows)


def _panel(axes: Axes, cells: np.ndarray, taus: Sequence[int], rhos: Sequence[float]) -> None:
    image = axes.imshow(cells, cmap=SEQUENTIAL, aspect="auto")
    axes.set_xticks(range(len(rhos)), [f"{rho:g}" for rho in rhos])
    axes.set_yticks(range(len(taus)), [str(tau) for tau in taus])
    axes.grid(False)
    for (i, j), value in np.ndenumerate(cells):
        if np.isfinite(value):
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=ink_on(image, value))
        else:
            axes.text(j, i, "no run", ha="center", va="center", color="0.5", fontsize="small")
