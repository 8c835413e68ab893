"""What methods know of earlier stages, after each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.metrics import Metric
from rayfl.plots.metrics import first_of, measure
from rayfl.plots.series import Series, need_alike, series_of
from rayfl.plots.style import SEQUENTIAL, ink_on, new_panels, wrapped
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.stages import ByStage, by_stage
from rayfl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _LEAST = 3.0, 2.4
"""Of a panel in inches; below the second a line has fewer of them."""


def draw(runs: Sequence[RunFolder], metric: str | None = None) -> tuple[Figure, pa.Table]:
    """Draws for each method how its personalized model does on test samples of each stage, after each stage.

    A panel is the mean over clients, and over seeds. Its title has the average over the stages after the last one, and
    forgetting (:class:`rayfl.results.stages.ByStage`).

    Args:
        runs: with stages whose test samples are scored one by one (``stages.name`` of ``classes`` or ``rotation``).
        metric: one of the task's; None: its first.

    Raises:
        ConfigError: a run has no such metric or no such scores, or runs have different numbers of stages.
    """
    shown = measure(first_of(runs).name if metric is None else metric, [run.rounds for run in runs])
    every = series_of(runs)
    need_alike(every, [shown.name])
    found = [(series, _mean(series, shown)) for series in every]
    sizes = {len(one.scores) for _, one in found}
    if len(sizes) > 1:
        raise ConfigError(f"stages: runs have {' and '.join(map(str, sorted(sizes)))} stages: draw them apart")
    size = sizes.pop()
    figure, panels = new_panels(len(found), _WIDTH, 0.9 + 0.35 * size, _LEAST)
    known = np.concatenate([one.scores[np.isfinite(one.scores)] for _, one in found])
    edges = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    rows: list[dict[str, Any]] = []
    for axes, (series, one) in zip(panels, found, strict=True):
        _panel(axes, one, edges)
        left = f"average {one.metric.shown(one.average)}, forgetting {one.metric.shown(one.forgetting)}"
        axes.set_title(f"{wrapped(series.label, _WIDTH)}\n{left}", fontsize="medium")
        rows += [
            {"series": series.label, "after": after + 1, "of": of + 1, one.metric.name: float(value)}
            for (after, of), value in np.ndenumerate(one.scores)
            if of <= after
        ]
    return figure, pa.Table.from_pylist(rows)


def _mean(series: Series, metric: Metric) -> ByStage:
    found = []
    for run in series.runs:
        own = PersonalizedRows.recorded(run.rounds) or PersonalizedRows.of(run.config.algorithm)
        one = by_stage(run.rounds, run.config.stages.stage_of, own, metric)
        if one is None:
            raise ConfigError(
                f"{run.uri} has no scores by stage: they are of runs with stages.name=classes or rotation that have "
                "ended a stage"
            )
        found.append(one)
    if len({one.scores.shape for one in found}) > 1:
        raise ConfigError(f"stages: seeds of {series.label} have ended different numbers of stages")
    return ByStage(found[0].metric, np.mean([one.scores for one in found], axis=0))


def _panel(axes: Axes, one: ByStage, edges: tuple[float, float]) -> None:
    metric: Metric = one.metric
    image = axes.imshow(one.scores, cmap=SEQUENTIAL, aspect="auto", vmin=edges[0], vmax=edges[1])
    numbers = range(len(one.scores))
    axes.set_xticks(numbers, [str(stage + 1) for stage in numbers])
    axes.set_yticks(numbers, [str(stage + 1) for stage in numbers])
    axes.set(xlabel="samples of stage", ylabel="after stage")
    axes.grid(False)
    for (after, of), value in np.ndenumerate(one.scores):
        if np.isfinite(value):
            shown = f"{metric.scale * value:.1f}" if metric.scale == 100 else metric.shown(value)
            axes.text(of, after, shown, ha="center", va="center", color=ink_on(image, value), fontsize="small")
