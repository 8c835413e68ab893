"""How long a round takes, the clients' part and the server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rayfl.errors import RunError
from rayfl.plots.series import Series, series_of
from rayfl.plots.style import colour, legend_below, new_figure
from rayfl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHASES = ("clients", "server", "commit")


def draw(runs: Sequence[RunFolder]) -> tuple[Figure, pa.Table]:
    """Mean seconds per round: waiting for clients, the server's own work, and what of the commit did not overlap.

    Evaluations of all clients are left out, but not the scores of a round's own clients (``evaluation.cohort_every``).
    Whiskers are the standard deviation over rounds. Times compare only if all runs were made
    on the same machine with nothing else on it.

    Args:
        runs: made with ``cluster.backend=ray``.

    Raises:
        RunError: for runs in one process, whose server waits for no clients: the parts cannot be told apart.
    """
    rows = [_row(series) for series in series_of(runs)]
    figure = new_figure(max(3.6, 1.6 + 1.1 * len(rows)), 3.6)
    axes = figure.subplots()
    width = 0.8 / len(_PHASES)
    places = np.arange(len(rows))
    for position, phase in enumerate(_PHASES):
        mean, spread = (np.array([row[f"{phase}{suffix}"] for row in rows]) for suffix in ("_s", "_s_std"))
        at = places + (position - (len(_PHASES) - 1) / 2) * width
        axes.bar(at, mean, width, color=colour(position), label=phase)
        axes.errorbar(at, mean, [np.minimum(spread, mean), spread], fmt="none", ecolor="0.3", elinewidth=0.8, capsize=2)
        for place, value, above in zip(at, mean, mean + spread, strict=True):
            axes.annotate(
                f"{value:.2g}", (place, above), xytext=(0, 3), textcoords="offset points", ha="center", fontsize="small"
            )
    long = max(len(str(row["series"])) for row in rows) > 12
    names = [str(row["series"]).replace(", ", "\n") for row in rows]
    axes.set_xticks(places, names, rotation=30 if long else 0, ha="right" if long else "center")
    axes.set_ylabel("seconds per round")
    axes.grid(axis="x", visible=False)
    legend_below(figure, axes)
    return figure, pa.Table.from_pylist(rows)


def _row(series: Series) -> dict[str, object]:
    for run in series.runs:
        if run.config.cluster.backend == "inline":
            raise RunError(
                f"{run.uri} was made in one process (cluster.backend=inline), where the clients' time is part "
                "of the server's: run it with cluster.backend=ray"
            )
    lines = [line for run in series.runs for line in run.timings]
    row: dict[str, object] = {"series": series.label, "rounds": len(lines)}
    for phase in _PHASES:
        seconds = np.array([line.get(phase, 0.0) for line in lines])
        row |= {f"{phase}_s": float(seconds.mean()), f"{phase}_s_std": float(seconds.std())}
    return row
