"""FLOCO's loss over the triangle of its three endpoints, and the clients' points in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from rayfl.errors import ConfigError, RunError
from rayfl.models.pretrained.mixing import at_point
from rayfl.params import Tree
from rayfl.plots.grids import SAMPLES, check_counts, check_number, losses, need_whole_models
from rayfl.plots.metrics import measure
from rayfl.plots.series import need_methods
from rayfl.plots.style import SEQUENTIAL, THETA, new_panels, subscript
from rayfl.runs.committed import CommittedModels, check_client
from rayfl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])
_FEWEST = 4
_LEVELS = 13
_LEAST = 1.6
"""Width of a panel in inches below which the names of its corners cover its title."""


def draw(
    runs: Sequence[RunFolder],
    clients: Sequence[int] | None = None,
    points: int = 24,
    samples: int = SAMPLES,
    split: str = "test",
) -> tuple[Figure, pa.Table]:
    """The loss of the server's model at every point of the simplex, in the newest commit.

    Left over samples of all clients, with all clients' points alpha_k; then over those of single clients, each with its
    own point as a star.

    Args:
        runs: one of FLOCO or FLOCO+ with ``algorithm.simplex_dimension=2``.
        clients: whose panels; None: the two whose points are farthest apart.
        points: along an edge; the grid has (points + 1) (points + 2) / 2.
        samples: at most this number in each panel.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        RayflError: for other runs, and before the clients have points.
    """
    check_counts(points, _FEWEST, samples)
    run = _checked(runs)
    models = CommittedModels(run)
    places: torch.Tensor | None = models.server.get("points")
    if places is None:
        raise RunError(
            f"{run.uri}: clients get their points at algorithm.assignment_round="
            f"{run.config.algorithm.assignment_round}; the newest commit is of round {models.rounds_completed}"
        )
    alphas = places.numpy()
    chosen = list(clients) if clients is not None else _apart(alphas)
    check_number(chosen, len(chosen), "each once")
    for client in chosen:
        check_client(run, client)
    grid = _lattice(points)
    panels = {"all clients": models.pooled(split, samples)}
    panels |= {f"client {client}": models.pooled(split, samples, [client]) for client in chosen}
    task = models.parts.task

    def model_at(alpha: np.ndarray) -> Tree:
        return model_on_simplex(models.server, alpha, task.network.head_weight)

    values = {name: losses(models, task, model_at, grid, examples) for name, examples in panels.items()}
    stars = {"all clients": alphas} | {f"client {client}": alphas[[client]] for client in chosen}
    figure, places_of = new_panels(len(panels), 3.1, 3.3, _LEAST)
    for axes, name in zip(places_of, panels, strict=True):
        _panel(figure, axes, name, grid, values[name], stars[name], measure("loss", [run.rounds]).axis)
    return figure, _table(grid, values, alphas, list(run.parts.dataset.names))


def _checked(runs: Sequence[RunFolder]) -> RunFolder:
    need_methods(runs, ["floco", "floco_plus"], "simplex")
    need_whole_models(runs, "simplex")
    if len(runs) != 1:
        raise ConfigError(f"simplex is of one run, not of {len(runs)}")
    dimension = runs[0].config.algorithm.simplex_dimension
    if dimension != 2:
        raise ConfigError(
            f"{runs[0].uri}: only a simplex of dimension 2 is a triangle that can be drawn, this one has "
            f"{dimension}: run it with algorithm.simplex_dimension=2"
        )
    return runs[0]


def model_on_simplex(server: Tree, alpha: np.ndarray, head: str) -> Tree:
    """Returns the server's model at a point of the simplex: its body and a mixture of its endpoints.

    Args:
        server: the server's state.
        alpha: the point, shape (m,).
        head: path of the head's weight, which is sum_m alpha_m theta_m; of adapters, their products are mixed.
    """
    endpoints = server["endpoints"]
    if not isinstance(endpoints, torch.Tensor):
        return {**server.get("body", {}), **at_point(endpoints, alpha.tolist())}
    weights = torch.from_numpy(alpha).to(endpoints).view(-1, *(1,) * (endpoints.dim() - 1))
    return {**server["body"], head: (weights * endpoints).sum(0)}


def _lattice(points: int) -> np.ndarray:
    """Points of the simplex at equal distances, float64 of shape (p, 3)."""
    pairs = [(i, j) for i in range(points + 1) for j in range(points + 1 - i)]
    return np.array([[i, j, points - i - j] for i, j in pairs], dtype=np.float64) / points


def _apart(alphas: np.ndarray) -> list[int]:
    distances = np.abs(alphas[:, None] - alphas[None]).sum(-1)
    first, second = np.unravel_index(distances.argmax(), distances.shape)
    return sorted({int(first), int(second)})


def _panel(
    figure: Figure, axes: Axes, title: str, grid: np.ndarray, values: np.ndarray, stars: np.ndarray, label: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    x, y = (grid @ _CORNERS).T
    image = axes.tricontourf(x, y, values, levels=_LEVELS, cmap=SEQUENTIAL)
    several = len(stars) > 1
    axes.plot(
        *(stars @ _CORNERS).T, linestyle="none", marker="o" if several else "*", markersize=5 if several else 13,
        color="white", markeredgecolor="black", markeredgewidth=0.8, clip_on=False,
    )  # fmt: skip
    for corner, (offset, side) in enumerate((((-4, -4), "right"), ((4, -4), "left"), ((0, 5), "center"))):
        axes.annotate(
            f"{THETA}{subscript(corner + 1)}", _CORNERS[corner], xytext=offset, textcoords="offset points", ha=side,
            va="bottom" if corner == 2 else "top",
        )  # fmt: skip
    axes.set_title(title, pad=14)
    axes.set(aspect="equal", xticks=[], yticks=[], xlim=(-0.08, 1.08), ylim=(-0.12, 1.02))
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.8, label=label)
    bar.ax.xaxis.set_major_locator(MaxNLocator(nbins=3))


def _table(grid: np.ndarray, values: dict[str, np.ndarray], alphas: np.ndarray, names: Sequence[str]) -> pa.Table:
    """The grid with its losses, then the clients' points without."""
    rows = [
        {"panel": panel, "client": None, **_coordinates(alpha), "loss": float(loss)}
        for panel, found in values.items()
        for alpha, loss in zip(grid, found, strict=True)
    ]
    rows += [
        {"panel": "points", "client": names[client], **_coordinates(alpha), "loss": None}
        for client, alpha in enumerate(alphas)
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _coordinates(alpha: np.ndarray) -> dict[str, float]:
    return {f"alpha_{m + 1}": float(value) for m, value in enumerate(alpha)}


_SCHEMA = pa.schema(
    [
        ("panel", pa.string()),
        ("client", pa.string()),
        *((f"alpha_{m + 1}", pa.float64()) for m in range(3)),
        ("loss", pa.float64()),
    ]
)
