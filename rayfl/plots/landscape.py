"""The loss on a plane through models of runs: surfaces above, contours below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.metrics import Metric
from rayfl.plots.grids import SAMPLES, check_counts, check_number, losses, need_whole_models
from rayfl.plots.metrics import measure
from rayfl.plots.planes import Plane, plane_around, plane_through
from rayfl.plots.series import experiment, series_of
from rayfl.plots.style import SEQUENTIAL, columns_for, new_figure, subscript
from rayfl.runs.committed import CommittedModels, check_client, single_model
from rayfl.runs.folder import RunFolder
from rayfl.tasks.base import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHT_DECAY = 1e-4
"""The surface is the task's loss + WEIGHT_DECAY / 2 ||w||^2."""
_PLANES = ("models", "random")
_REACH = 1.0
_MARGIN = 0.3
_FEWEST = 5
_LEVELS = 14
_LEAST = 2.2
"""Width of a panel in inches below which the labels of its surface cover each other."""
_SHOWN = 0.85
"""Of the range of losses; what lies above is cut off, so that the valley can be seen."""


@dataclass(frozen=True)
class _Panel:
    """A surface: coordinates of shape (p,) each, losses of shape (p, p) by (b, a), and the names of the anchors."""

    title: str
    a: np.ndarray
    b: np.ndarray
    values: np.ndarray
    anchors: np.ndarray
    names: tuple[str, ...]


def draw(
    runs: Sequence[RunFolder],
    plane: str = "models",
    clients: Sequence[int] | None = None,
    points: int = 21,
    samples: int = SAMPLES,
    split: str = "test",
) -> tuple[Figure, pa.Table]:
    """CE + 1e-4 / 2 ||w||^2 of the models of newest commits, over samples of all clients together, or of two.

    CE is the loss of the task, whatever that is.

    ``models``: of three runs, the plane through their global models; of one run, that through its global model and the
    own models of two clients (of SuPerFed w^l), over the samples of these two. ``random``: for every run a panel around
    its global model, in two random filter-normalised directions (``rayfl.plots.planes`` says how), equal draws for runs
    with equal seeds.

    Args:
        runs: on the same data and with the same model.
        plane: ``models`` or ``random``.
        clients: the two clients, for one run; None: the first two that have trained.
        points: of the grid, in each direction.
        samples: at most this number.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        RayflError: for other numbers of runs or clients, different data or models, and methods without such models.
    """
    check_counts(points, _FEWEST, samples)
    _check(runs, plane, clients)
    wanted = len(runs) if plane == "random" else 1
    if (room := columns_for(wanted, _LEAST)) < wanted:
        raise ConfigError(
            f"landscape: this --size has room for {room} of {wanted} panels: choose a wider one, or give fewer runs"
        )
    models = [CommittedModels(run) for run in runs]
    labels = {series.runs[0].uri: series.label for series in series_of(runs, pooled=False)}
    titles = [labels.get(run.uri, run.name) for run in runs]
    if plane == "random":
        panels = [_around(m, title, points, samples, split) for m, title in zip(models, titles, strict=True)]
    elif len(runs) == 1:
        panels = [_own(models[0], titles[0], clients, points, samples, split)]
    else:
        found = [_global(one) for one in models]
        pooled = models[0].pooled(split, samples)
        through = plane_through(found, models[0].parts.task)
        panels = [_panel(models[0], through, "through the global models", tuple(titles), points, pooled)]
    return _figure(panels, measure("loss", [runs[0].rounds])), _table(panels)


def _check(runs: Sequence[RunFolder], plane: str, clients: Sequence[int] | None) -> None:
    if plane not in _PLANES:
        raise ConfigError(f"--plane: there is no {plane!r}; there are {', '.join(_PLANES)}")
    if plane == "models" and len(runs) not in (1, 3):
        raise ConfigError(
            f"landscape: a plane through models needs three runs, or one whose clients have models of their own; these "
            f"are {len(runs)}. With --plane random every run has a panel"
        )
    need_whole_models(runs, "landscape")
    if clients is not None and (plane == "random" or len(runs) > 1):
        raise ConfigError("--clients: only the plane through models of one run has clients' models")
    for run in runs[1:]:
        both = experiment(run), experiment(runs[0])
        if both[0]["model"]["name"] != both[1]["model"]["name"] or run.parts.partition_hash != (
            runs[0].parts.partition_hash
        ):
            raise ConfigError(f"landscape: {run.uri} has another model or other data than {runs[0].uri}")


def _global(models: CommittedModels) -> Model:
    return single_model(models.predictor(0, "global"), "global")


def _around(models: CommittedModels, title: str, points: int, samples: int, split: str) -> _Panel:
    generator = models.parts.streams.generator("landscape")
    around = plane_around(_global(models), models.parts.task, generator)
    return _panel(models, around, title, ("global",), points, models.pooled(split, samples))


def _own(
    models: CommittedModels, title: str, clients: Sequence[int] | None, points: int, samples: int, split: str
) -> _Panel:
    """The plane through the global model and those of two clients."""
    rows = models.run.own
    row = f"{rows.sweep}=1.0" if rows.sweep is not None else rows.model
    if row == "global":
        raise ConfigError(
            f"landscape: the clients of {models.run.config.algorithm.name} have no models of their own; give three "
            "runs, or --plane random"
        )
    chosen = list(clients) if clients is not None else sorted(models.manifest.states)[:2] or [0, 1]
    check_number(chosen, 2, "whose models, with the global one, the plane goes through")
    for client in chosen:
        check_client(models.run, client)
    own = [single_model(models.predictor(client, row), row) for client in chosen]
    through = plane_through([_global(models), *own], models.parts.task)
    examples = models.pooled(split, samples, chosen)
    return _panel(models, through, title, ("global", *(f"client {c}" for c in chosen)), points, examples)


def _panel(
    models: CommittedModels, plane: Plane, title: str, names: tuple[str, ...], points: int, examples: Examples
) -> _Panel:
    low, high = plane.anchors.min(0), plane.anchors.max(0)
    margin = _MARGIN * (high - low).max() if len(plane.anchors) > 1 else _REACH
    a, b = (np.linspace(low[axis] - margin, high[axis] + margin, points) for axis in (0, 1))
    grid = np.stack(np.meshgrid(a, b), -1).reshape(-1, 2)
    values = losses(models, models.parts.task, plane.at, grid, examples)
    values += WEIGHT_DECAY / 2 * np.array([plane.squared_norm(point) for point in grid])
    return _Panel(title, a, b, values.reshape(points, points), plane.anchors, names)


def _figure(panels: Sequence[_Panel], loss: Metric) -> Figure:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator, NullLocator

    everything = np.concatenate([panel.values.ravel() for panel in panels])
    everything = everything[np.isfinite(everything)]
    least, most = float(everything.min()), float(np.quantile(everything, _SHOWN))
    most = max(most, least * 1.01)
    norm, levels = LogNorm(least, most), np.geomspace(least, most, _LEVELS)
    figure = new_figure(1.4 + 3.7 * len(panels), 6.6)
    # Constrained layout does not know how much room 3-D axes need.
    figure.set_layout_engine("none")
    columns = figure.add_gridspec(
        2, len(panels) + 1, width_ratios=[*[1.0] * len(panels), 0.05], left=0.75 / figure.get_figwidth(),
        right=1 - 0.95 / figure.get_figwidth(), bottom=0.09, top=0.95, wspace=0.22, hspace=0.12,
    )  # fmt: skip
    for column, panel in enumerate(panels):
        shown = np.clip(np.nan_to_num(panel.values, nan=most, posinf=most), least, most)
        x, y = np.meshgrid(panel.a, panel.b)
        surface: Any = figure.add_subplot(columns[0, column], projection="3d")
        surface.plot_surface(
            x, y, np.log10(shown), cmap=SEQUENTIAL, vmin=np.log10(least), vmax=np.log10(most), rcount=len(panel.b),
            ccount=len(panel.a), linewidth=0.2, edgecolor="0.4", antialiased=True,
        )  # fmt: skip
        surface.set_title(panel.title)
        last = column == len(panels) - 1
        surface.set(xlabel="a", ylabel="b", zlabel=f"log{subscript(10)} loss" if last else None)
        surface.tick_params(labelsize="x-small", pad=0)
        for axis in (surface.xaxis, surface.yaxis, surface.zaxis):
            axis.set_major_locator(MaxNLocator(4))
            axis.labelpad = -2
        surface.zaxis.labelpad = 3
        surface.view_init(elev=32, azim=-60)
        surface.set_box_aspect(None, zoom=0.92)
        flat = figure.add_subplot(columns[1, column])
        image = flat.contourf(x, y, shown, levels=levels, cmap=SEQUENTIAL, norm=norm, extend="max")
        flat.contour(x, y, shown, levels=levels, colors="white", linewidths=0.4)
        flat.set(xlabel="a", ylabel="b" if column == 0 else None, aspect="equal")
        flat.locator_params(nbins=5)
        flat.grid(False)
        _anchors(flat, panel)
    bar = figure.colorbar(image, cax=figure.add_subplot(columns[1, -1]), ticks=levels[::3], format="{x:.3g}")
    bar.ax.yaxis.set_minor_locator(NullLocator())
    name = "CE" if loss.unit == "nats" else loss.label
    bar.set_label(f"{name} + 1e-4 / 2 ||w||\N{SUPERSCRIPT TWO} {f'({loss.unit})' if loss.unit else ''}".rstrip())
    return figure


def _anchors(axes: Axes, panel: _Panel) -> None:
    """Stars with names, above and below by turns: neighbours' names would cover each other."""
    for position, ((a, b), name) in enumerate(zip(panel.anchors, panel.names, strict=True)):
        below = position % 2 == 1
        axes.plot(a, b, marker="*", color="white", markeredgecolor="black", markersize=11)
        axes.annotate(
            name, (a, b), xytext=(0, -9 if below else 9), textcoords="offset points", ha="center", fontsize="small",
            va="top" if below else "bottom", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
        )  # fmt: skip


def _table(panels: Sequence[_Panel]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"panel": panel.title, "a": float(a), "b": float(b), "loss": float(panel.values[j, i])}
            for panel in panels
            for j, b in enumerate(panel.b)
            for i, a in enumerate(panel.a)
        ]
    )
