"""Inputs, their masks and what models predict of them, for runs of segmentation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples
from rayfl.metrics.language import IGNORED
from rayfl.plots.grids import check_samples
from rayfl.plots.series import series_of
from rayfl.plots.style import COLOURS, SEQUENTIAL, columns_for, new_figure
from rayfl.runs.committed import CommittedModels, check_client, personalized_predictor, task_of
from rayfl.runs.folder import RunFolder
from rayfl.runs.listing import listed_clients

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_PANEL, _LEAST = 1.5, 0.78
"""Width of a panel in inches on a screen, and the least in a paper."""
_LETTER = 0.085
"""Width of a letter of a title, in inches."""
_BACKGROUND = "0.9"


@dataclass(frozen=True)
class _Sample:
    """A sample of a client, and what each run predicts of it.

    Attributes:
        client: its number.
        place: among the client's samples that are drawn.
        x: the input, shape (C, H, W) or (C, H, W, D).
        mask: classes, shape (H, W) or (H, W, D).
        predicted: classes by run, of that shape.
        rows: of the table, by run.
    """

    client: int
    place: int
    x: np.ndarray
    mask: np.ndarray
    predicted: list[np.ndarray]
    rows: list[dict[str, Any]]


def draw(
    runs: Sequence[RunFolder],
    model: str | None = None,
    clients: Sequence[int] | None = None,
    samples: int = 1,
    split: str = "test",
) -> tuple[Figure, pa.Table]:
    """Draws samples of clients in lines: the input, its mask, and each run's prediction, of the newest commit.

    Of a volume, the slice along the last axis whose mask has the most voxels of other classes than 0 is drawn. The
    numbers are those of the whole sample.

    Args:
        runs: of the task ``segmentation``, on the same data with the same seed.
        model: a row of the tables; None: each method's personalized model.
        clients: whose samples; None: the clients that do worst, in the middle and best by the task's first metric, in
            the last evaluation of the first run.
        samples: of each client, drawn at random.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        RayflError: for runs of other tasks, of other data, or without such a model.
    """
    check_samples(samples)
    labels = _checked(runs, split)
    if (room := columns_for(2 + len(runs), _LEAST)) < 2 + len(runs):
        raise ConfigError(
            f"masks: this --size has room for {room} of {2 + len(runs)} panels side by side: choose a wider one, or "
            "give fewer runs"
        )
    opened = [CommittedModels(run) for run in runs]
    chosen = _extremes(runs[0], model, split) if clients is None else list(dict.fromkeys(clients))
    for run in runs:
        for client in chosen:
            check_client(run, client)
    shown = [sample for client in chosen for sample in _of_client(opened, labels, client, model, samples, split)]
    classes = runs[0].parts.dataset.spec.num_classes
    return _figure(shown, labels, classes), pa.Table.from_pylist([row for sample in shown for row in sample.rows])


def _checked(runs: Sequence[RunFolder], split: str) -> list[str]:
    """The label of each run."""
    for run in runs:
        if run.parts.dataset.spec.target != "mask":
            raise ConfigError(f"{run.uri} is a run of {run.parts.task.name}; masks is of runs with task=segmentation")
    if split not in SPLITS:
        raise ConfigError(f"--split: masks takes {', '.join(SPLITS)}, not {split!r}")
    series = series_of(runs, pooled=False)
    if len(series) < len(runs):
        raise ConfigError("masks: runs that differ in their seeds alone have other clients: give one of each method")
    return [one.label for one in series]


def _extremes(run: RunFolder, model: str | None, split: str) -> list[int]:
    """The worst, the middle and the best client."""
    listed, _, _ = listed_clients(run, model, "validation" if split == "validation" else "test", None)
    first = run.parts.task.measures.first
    known = sorted((row for row in listed if row[first.name] is not None), key=lambda row: first.sign * row[first.name])
    places = dict.fromkeys((0, len(known) // 2, len(known) - 1)) if known else {}
    return [int(known[place]["client"]) for place in places] or [0]


def _of_client(
    opened: Sequence[CommittedModels], labels: Sequence[str], client: int, model: str | None, samples: int, split: str
) -> list[_Sample]:
    """A client's samples with the predictions of all runs."""
    drawn = [models.pooled(split, samples, [client]) for models in opened]
    same = [torch.equal(one.x, drawn[0].x) and torch.equal(one.y, drawn[0].y) for one in drawn]
    if not all(same):
        other = opened[same.index(False)].run.uri
        raise ConfigError(
            f"masks: client {client} has other samples in {other} than in {opened[0].run.uri}: give runs with the same "
            "dataset, partition, holdout, transform and seed"
        )
    predicted, rows = [], []
    for models, label in zip(opened, labels, strict=True):
        row, predictor = personalized_predictor(models, client, model)
        task = task_of(predictor, models.parts.task)
        with torch.no_grad():
            found = predictor.predictions(predictor.built(), drawn[0].x.clone(), models.parts.task)
        predicted.append(found.argmax(-1).numpy())
        key = {"series": label, "model": row, "round": models.rounds_completed, "client": client}
        key["name"] = models.parts.dataset.names[client]
        for place in range(len(drawn[0])):
            one = Examples(drawn[0].x[place : place + 1], drawn[0].y[place : place + 1])
            scores = evaluate({"": predictor}, one, task, 1)[""].metrics()
            rows.append(key | {"sample": place} | scores)
    count = len(drawn[0])
    return [
        _Sample(
            client,
            place,
            drawn[0].x[place].numpy(),
            drawn[0].y[place].numpy(),
            [found[place] for found in predicted],
            rows[place::count],
        )
        for place in range(count)
    ]


def _figure(shown: Sequence[_Sample], labels: Sequence[str], classes: int) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    columns = 2 + len(labels)
    figure = new_figure(_PANEL * columns, 1.0)
    each = figure.get_figwidth() / columns
    figure.set_figheight(1.25 * each * len(shown) + 1.0)
    colours, norm = _colours(classes), BoundaryNorm(np.arange(classes + 1) - 0.5, classes)
    titles = [textwrap.fill(title, max(8, int(each / _LETTER))) for title in ("input", "mask", *labels)]
    for line, sample in enumerate(shown):
        at = _slice(sample.mask)
        panels = [figure.add_subplot(len(shown), columns, line * columns + 1 + place) for place in range(columns)]
        _input(panels[0], sample.x[..., at] if sample.mask.ndim == 3 else sample.x)
        for axes, classes_at in zip(panels[1:], (sample.mask, *sample.predicted), strict=True):
            found = classes_at[..., at] if sample.mask.ndim == 3 else classes_at
            axes.imshow(np.ma.masked_equal(found, IGNORED), cmap=colours, norm=norm, interpolation="nearest")
        for axes in panels:
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
        panels[0].set_ylabel(f"client {sample.client}")
        for axes, row in zip(panels[2:], sample.rows, strict=True):
            axes.set_xlabel(f"Dice {100 * row['dice']:.0f} %" if np.isfinite(row["dice"]) else "no Dice")
        if line == 0:
            for axes, title in zip(panels, titles, strict=True):
                axes.set_title(title)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=figure.axes, location="bottom", shrink=0.6, aspect=30)
    step = -(-classes // 10)
    bar.set_ticks(list(range(0, classes, step)))
    bar.ax.tick_params(length=0, which="both")
    bar.set_label("class (white: counts nowhere)")
    return figure


def _colours(classes: int) -> Colormap:
    """Grey for class 0, and one colour for each other class."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    few = classes <= len(COLOURS) + 1
    others = COLOURS[: classes - 1] if few else colormaps[SEQUENTIAL](np.linspace(0, 1, classes - 1))
    return ListedColormap([_BACKGROUND, *others]).with_extremes(bad="white")


def _slice(mask: np.ndarray) -> int:
    """The slice of a volume with the most voxels of other classes than 0; 0 for an image."""
    if mask.ndim == 2:
        return 0
    return int(((mask > 0) & (mask != IGNORED)).sum((0, 1)).argmax())


def _input(axes: Axes, x: np.ndarray) -> None:
    """Three channels are colours; of others the first is drawn. The smallest value is black, the largest white."""
    low, high = float(x.min()), float(x.max())
    pixels = (x - low) / ((high - low) or 1)
    if len(x) == 3:
        axes.imshow(np.moveaxis(pixels, 0, -1), interpolation="nearest")
    else:
        axes.imshow(pixels[0], cmap="gray", interpolation="nearest")
