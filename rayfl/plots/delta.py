"""What a new download does to clients that have just trained (FedPHP's delta_t)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import RunError
from rayfl.plots.metrics import need_accuracy
from rayfl.plots.series import Series, seeds_together, series_of
from rayfl.plots.style import DELTA_T, colour, draw_curve, legend_below, new_panels, whole_numbers
from rayfl.runs.curves import accuracy_curve, download_effect
from rayfl.runs.folder import RunFolder
from rayfl.runs.rows import where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST = 2.4
"""Width of a panel in inches below which its title is cut off."""
_OWN = "hpm"
"""The row of what FedPHP's clients go on with, after training and after the next download."""
_TRAINED = ((_OWN,), ("local", "lambda=0.0"))
"""Rows of trained models; SuPerFed's is called local in its first phase and lambda=0.0 in its second."""


def draw(runs: Sequence[RunFolder]) -> tuple[Figure, pa.Table]:
    """Draws a round's clients' test accuracy after training (+) and with what they receive next (x), and delta_t.

    delta_t is the mean over the round's clients of Acc(next download) - Acc(after training) (Li et al., ECML PKDD
    2021, eq. 4). For FedPHP both are the inherited private model, so it is 0; for other methods the trained model and
    the server's.

    Args:
        runs: with ``evaluation.cohort_received=true``; curves are means over seeds.

    Raises:
        RunError: for a run without these rows.
    """
    need_accuracy(runs, "the figure delta")
    rows = [row for series in series_of(runs) for row in _rows(series)]
    figure, (stages, deltas) = new_panels(2, 4.1, 3.5, _LEAST)
    for position, label in enumerate(dict.fromkeys(row["series"] for row in rows)):
        mine = [row for row in rows if row["series"] == label]
        _stages(stages, mine, position)
        xs, delta = (np.array([row[column] for row in mine]) for column in ("round", "delta"))
        draw_curve(deltas, position, str(label), xs, 100 * delta)
    deltas.axhline(0, color="0.4", linewidth=0.8)
    stages.set(xlabel="round", ylabel="accuracy (%)", title="+ after training, x next download")
    deltas.set(xlabel="round", ylabel=f"{DELTA_T} (percentage points)", title="effect of the next download")
    for axes in (stages, deltas):
        whole_numbers(axes)
    legend_below(figure, deltas)
    return figure, pa.Table.from_pylist(rows)


def _rows(series: Series) -> list[dict[str, object]]:
    found = [_curves(run) for run in series.runs]
    after, before, delta, clients = (seeds_together(list(curves)) for curves in zip(*found, strict=True))
    return [
        {
            "series": series.label,
            "round": round,
            "after_training": after[round][0],
            "next_download": before[round][0],
            "delta": delta[round][0],
            "clients": clients[round][0],
            "seeds": len(series.runs),
        }
        for round in delta
    ]


def _curves(run: RunFolder) -> tuple[dict[int, float], dict[int, float], dict[int, float], dict[int, float]]:
    """Accuracies after training and with the next download, delta_t, and over how many clients it is, by round."""
    test = where(run.rounds, cohort="selected", split="test", selected_on="")
    rows = {phase: set(where(test, phase=phase)["model"].to_pylist()) for phase in ("received", "trained")}
    if not rows["received"]:
        raise RunError(
            f"{run.uri} has no rows of what its cohorts receive next: run it with evaluation.cohort_received=true"
        )
    received = next((name for name in (_OWN, "global") if name in rows["received"]), None)
    trained = next((names for names in _TRAINED if rows["trained"].intersection(names)), None)
    if received is None and run.own.model in rows["received"]:
        received = run.own.model
    if trained is None and run.own.model in rows["trained"]:
        trained = (run.own.model,)
    if received is None or trained is None:
        raise RunError(
            f"{run.uri}: {run.config.algorithm.name} has no global or personalized model of its cohorts before "
            "and after training; delta_t is not defined"
        )
    after: dict[int, float] = {}
    effects: dict[int, float] = {}
    counts: dict[int, float] = {}
    for name in trained:
        after |= accuracy_curve(run.rounds, name, "selected", "trained")
        found = download_effect(run.clients, received, name)
        effects |= {round: float(np.mean(list(clients.values()))) for round, clients in found.items()}
        counts |= {round: len(clients) for round, clients in found.items()}
    before = accuracy_curve(run.rounds, received, "selected", "received")
    return after, before, dict(sorted(effects.items())), counts


def _stages(axes: Axes, rows: Sequence[dict[str, object]], position: int) -> None:
    """Every round's clients as two points, the first above its round, the second at the next one's place."""
    rounds, after, before = (
        np.array([row[column] for row in rows], dtype=float) for column in ("round", "after_training", "next_download")
    )
    look: dict[str, Any] = {"color": colour(position), "linestyle": "none"}
    axes.plot([rounds, rounds + 0.6], [100 * after, 100 * before], color=colour(position), linestyle=":", linewidth=1)
    axes.plot(rounds, 100 * after, marker="+", **look)
    axes.plot(rounds + 0.6, 100 * before, marker="x", **look)
