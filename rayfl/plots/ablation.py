"""SuPerFed's ablations: nu by mu as a grid of lambda curves, or the phase ratio L/R."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.plots.lambda_sweep import draw as draw_sweep
from rayfl.plots.metrics import need_accuracy
from rayfl.plots.series import need_methods, need_same_but, series_of
from rayfl.plots.style import LAMBDA, MU, NU, colour, legend_below, marker, new_figure
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Split
from rayfl.runs.rows import last_of_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NU, _MU, _START, _MODE = (
    f"algorithm.{field}" for field in ("orthogonality_weight", "proximal_weight", "start", "mode")
)
_MODES = ("mm", "lm")


def draw(runs: Sequence[RunFolder], split: Split = "test") -> tuple[Figure, pa.Table]:
    """Draws a panel per nu (rows) and mu (columns), or one panel over L/R, whichever the runs differ in.

    Panels show accuracy over all clients after the last round against lambda, with standard deviations over clients,
    and name the best mean and, in brackets, the global model's. Over L/R it is that of the lambda that was chosen on
    validation data, and the global model's.

    Args:
        runs: of SuPerFed, several; modes mm and lm are two lines.
        split: ``validation`` or ``test``.

    Raises:
        RayflError: for runs of other methods, or runs that differ in anything else.
    """
    need_accuracy(runs, "the figure ablation")
    kind = "ablation"
    need_methods(runs, ["superfed"], kind)
    need_same_but(runs, [_NU, _MU, _START, _MODE], kind)
    # Of each mode by itself: the default of nu is another for each, which is no ablation.
    weights: dict[str, set[tuple[float, float]]] = {}
    for run in runs:
        algorithm = run.config.algorithm
        weights.setdefault(algorithm.mode, set()).add((algorithm.nu, algorithm.proximal_weight))
    several = any(len(found) > 1 for found in weights.values())
    starts = {run.config.algorithm.start for run in runs}
    if several and len(starts) > 1:
        raise ConfigError(
            "ablation: the runs differ in nu or mu and in the phase ratio (algorithm.start): give those that differ in "
            "one of the two"
        )
    if len(starts) > 1:
        return _over_ratio(runs, split)
    if not several:
        raise ConfigError(
            "ablation needs runs that differ in algorithm.orthogonality_weight (nu) and algorithm.proximal_weight (mu) "
            "or in algorithm.start (L/R)"
        )
    return _over_weights(runs, split)


def _over_weights(runs: Sequence[RunFolder], split: Split) -> tuple[Figure, pa.Table]:
    rows = [row for series in series_of(runs) for row in _cell(series.runs, split)]
    nus, mus = (sorted({row[column] for row in rows}) for column in ("nu", "mu"))
    figure = new_figure(0.8 + 1.9 * len(mus), 0.9 + 1.6 * len(nus))
    panels = figure.subplots(len(nus), len(mus), sharex=True, sharey=True, squeeze=False)
    for i, nu in enumerate(nus):
        for j, mu in enumerate(mus):
            axes = panels[i][j]
            _panel(axes, [row for row in rows if (row["nu"], row["mu"]) == (nu, mu)])
            if i == 0:
                axes.set_title(f"{MU} = {mu:g}")
            if j == len(mus) - 1:
                place = {"xycoords": "axes fraction", "rotation": 270, "ha": "left", "va": "center"}
                axes.annotate(f"{NU} = {nu:g}", (1.03, 0.5), **place)
    figure.supxlabel(LAMBDA, fontsize="medium")
    figure.supylabel("accuracy (%)", fontsize="medium")
    if len({row["mode"] for row in rows}) > 1:
        fullest = max(
            (axes for line in panels for axes in line), key=lambda axes: len(axes.get_legend_handles_labels()[1])
        )
        legend_below(figure, fullest)
    return figure, pa.Table.from_pylist(rows)


def _cell(runs: Sequence[RunFolder], split: Split) -> list[dict[str, Any]]:
    """Returns the rows of one experiment's line."""
    algorithm = runs[0].config.algorithm
    _, table = draw_sweep(runs, "top1", split)
    label = {"nu": algorithm.nu, "mu": algorithm.proximal_weight, "mode": algorithm.mode}
    overall = _mean_last(runs, "global", split)
    return [
        {
            **label,
            **{key: row[key] for key in ("lambda", "top1", "top1_std_over_clients", "clients", "seeds")},
            "global_top1": overall,
        }
        for row in table.to_pylist()
    ]


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    if not rows:
        axes.annotate("no run", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color="0.5")
        return
    notes = []
    for position, mode in enumerate(_MODES):
        mine = [row for row in rows if row["mode"] == mode]
        if not mine:
            continue
        xs, mean, spread = (
            np.array([row[column] for row in mine]) for column in ("lambda", "top1", "top1_std_over_clients")
        )
        axes.errorbar(
            xs, 100 * mean, _whiskers(mean, spread), color=colour(position), marker=marker(position), markersize=3,
            linewidth=1.2, elinewidth=0.6, label=f"SuPerFed-{mode.upper()}",
        )  # fmt: skip
        best, overall = mean.max(), mine[0]["global_top1"]
        notes.append(f"{100 * best:.1f}* ({100 * overall:.1f})")  # chosen by the very data that it is measured on
    axes.annotate(
        "\n".join(notes), (0.5, 0.04), xycoords="axes fraction", ha="center", va="bottom", fontsize="small",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip
    axes.set_xlim(-0.05, 1.05)


def _over_ratio(runs: Sequence[RunFolder], split: Split) -> tuple[Figure, pa.Table]:
    rows = []
    for series in series_of(runs):
        algorithm = series.config.algorithm
        last = last_of_seeds(series.runs, None, split)
        rows.append(
            {
                "mode": algorithm.mode,
                "ratio": algorithm.start,
                "lambda": ", ".join(row["choice"].partition("=")[2] for row in last),
                "top1": float(np.mean([row["top1"] for row in last])),
                "top1_std_over_clients": float(np.mean([row["top1_std"] for row in last])),
                "global_top1": _mean_last(series.runs, "global", split),
                "clients": min(row["clients"] for row in last),
                "seeds": len(series.runs),
            }
        )
    rows.sort(key=lambda row: (_MODES.index(row["mode"]), row["ratio"]))
    figure = new_figure(4.6, 3.6)
    axes = figure.subplots()
    for position, mode in enumerate(_MODES):
        mine = [row for row in rows if row["mode"] == mode]
        if not mine:
            continue
        xs, mean, spread, overall = (
            np.array([row[column] for row in mine])
            for column in ("ratio", "top1", "top1_std_over_clients", "global_top1")
        )
        name = f"SuPerFed-{mode.upper()}"
        look: dict[str, Any] = {"color": colour(position), "marker": marker(position)}
        axes.errorbar(xs, 100 * mean, _whiskers(mean, spread), capsize=2, elinewidth=0.8, label=name, **look)
        axes.plot(xs, 100 * overall, linestyle="--", label=f"{name}, global", **look)
    axes.set(xlabel="L/R, share of the first phase", ylabel="accuracy (%)")
    legend_below(figure, axes)
    return figure, pa.Table.from_pylist(rows)


def _whiskers(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Returns the percent below and above a mean accuracy, shape (2, n): no client is beyond 0 and 100 %."""
    return 100 * np.stack([np.minimum(spread, mean), np.minimum(spread, 1 - mean)])


def _mean_last(runs: Sequence[RunFolder], model: str, split: Split) -> float:
    return float(np.mean([row["top1"] for row in last_of_seeds(runs, model, split)]))
