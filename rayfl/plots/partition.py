"""A picture of a partition: which client has how many samples of which class, and how large the clients are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayfl.data.federated import FederatedDataset
from rayfl.data.files.whole import new_file
from rayfl.data.partitions.stats import counts_by_class
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, UNLABELLED, Target
from rayfl.plots.style import SPLIT_COLOURS
from rayfl.tracking.plain_text import PLAIN_TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".pdf", ".svg")
_MOST_BUBBLES = 60
"""With more clients a heat map takes the place of bubbles."""
_MOST_UNEQUAL = 50
"""Also where the largest number of samples is this multiple of the median: the other bubbles would be dots."""
_MOST_IN_ORDER = 200
"""More clients are sorted by their commonest class, so that groups can be seen where single columns cannot."""
_MOST_TICKS = 26
_LARGEST_BUBBLE = 0.85
_UNLABELLED = "0.8"
DPI = 150
"""Dots per inch where none are asked for."""
_TENTHS, _IN_TENTHS = 10, ("values", "survival")
KINDS: dict[Target, str] = {
    "class": "class",
    "labels": "label",
    "values": "tenth of the range of target 0",
    "tokens": "text",
    "mask": "class",
    "survival": "tenth of the range of times",
    "preference": "pair of texts",
    "ranking": "interaction",
    "nodes": "class",
    "forecast": "window",
}
"""What the rows of a picture are, by what is known of a sample."""


def label_matrix(dataset: FederatedDataset) -> np.ndarray:
    """Samples by client and class over all splits, int64 of shape (K, num_classes).

    A sample with several labels, or classes in its mask, counts for each, a graph with each of its nodes. Where a
    sample has numbers, or the time of an event, the columns are tenths of the range of the first number. Where it is a
    text, a pair of texts or a window of series, there is one column.
    """
    spec = dataset.spec
    targets = [np.concatenate(list(dataset.labels(client).values())) for client in range(dataset.num_clients)]
    if spec.target in ("labels", "mask", "nodes"):
        return np.stack([counts_by_class(labels, spec) for labels in targets])
    if spec.target in ("tokens", "preference", "forecast"):
        return np.array([[len(tokens)] for tokens in targets])
    if spec.target in _IN_TENTHS:
        first = np.concatenate(targets)[:, 0]
        edges = np.linspace(first.min(), first.max(), _TENTHS + 1)[1:-1]
        targets = [np.searchsorted(edges, values[:, 0], side="right") for values in targets]
    count = _TENTHS if spec.target in _IN_TENTHS else spec.num_classes
    return np.stack([np.bincount(labels, minlength=count) for labels in targets])


def draw_partition(dataset: FederatedDataset, title: str) -> Figure:
    """The picture.

    Up to 60 clients are columns of bubbles whose areas are numbers of samples; more, or very unequal ones, are a heat
    map, and above 200 the clients are sorted by their commonest class. Above it are the clients' sizes by split, beside
    it the classes'. Training samples without a label are in the sizes alone.

    Args:
        dataset: whose clients are drawn; their labels are read one client at a time.
        title: what to write above it.
    """
    import matplotlib

    with matplotlib.rc_context(PLAIN_TEXT):
        return _drawn(dataset, title)


def _drawn(dataset: FederatedDataset, title: str) -> Figure:
    from matplotlib.figure import Figure

    counts, sizes = label_matrix(dataset), np.column_stack([dataset.sizes(), dataset.unlabelled_sizes()])
    order = np.arange(len(counts))
    if len(counts) > _MOST_IN_ORDER:
        order = np.lexsort((-sizes.sum(1), counts.argmax(1)))
    counts, sizes = counts[order], sizes[order]
    clients, classes = counts.shape
    width = float(np.clip(2.6 + 0.24 * clients, 7.5, 15))
    height = float(np.clip(2.8 + 0.26 * classes, 5, 12))
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 2, width_ratios=[5, 1], height_ratios=[1, max(1.5, (height - 2.5) / 1.3)])
    main = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=main)
    beside = figure.add_subplot(grid[1, 1], sharey=main)
    if clients <= _MOST_BUBBLES and counts.max() <= _MOST_UNEQUAL * np.median(counts[counts > 0]):
        _bubbles(main, counts)
    else:
        _heat_map(figure, main, counts)
    ordered = ", sorted by commonest class" if len(counts) > _MOST_IN_ORDER else ""
    main.set(
        xlabel=f"client{ordered} ({clients} in all)", ylabel=KINDS[dataset.spec.target], xlim=(-0.5, clients - 0.5)
    )
    main.set_ylim(classes - 0.5, -0.5)
    _few_ticks(main, classes, dataset.names if len(counts) <= _MOST_IN_ORDER else None)
    _sizes(above, sizes)
    above.tick_params(bottom=len(counts) <= _MOST_IN_ORDER)
    totals = counts.sum(0)
    beside.barh(np.arange(classes), totals, height=0.8, color=SPLIT_COLOURS[0])
    beside.set(xlabel="samples", xlim=(0, max(1, totals.max()) * 1.05))
    beside.tick_params(labelleft=False)
    beside.locator_params(axis="x", nbins=3)
    return figure


def check_format(destination: Path) -> None:
    """Raises ConfigError for a name with another ending than .png, .pdf and .svg."""
    if destination.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--out: {destination} must end in {', '.join(_FORMATS)}")


def save_figure(figure: Figure, destination: Path, dpi: int = DPI) -> None:
    """Writes a picture in the format that its name ends in.

    Args:
        figure: the picture.
        destination: where to.
        dpi: dots per inch of what is made of pixels.

    Raises:
        ConfigError: another ending than .png, .pdf and .svg.
        DataError: the file cannot be written.
    """
    import matplotlib

    check_format(destination)
    with new_file(destination) as file, matplotlib.rc_context(PLAIN_TEXT):
        figure.savefig(file, format=destination.suffix[1:].lower(), dpi=dpi)


def _bubbles(axes: Axes, counts: np.ndarray) -> None:
    from matplotlib.collections import EllipseCollection

    client, label = np.nonzero(counts)
    values = counts[client, label]
    diameters = _LARGEST_BUBBLE * np.sqrt(values / max(1, counts.max()))
    # In units of the axes, so that no bubble ever covers a neighbour, whatever the figure's size.
    axes.add_collection(
        EllipseCollection(
            diameters,
            diameters,
            np.zeros(len(values)),
            units="xy",
            offsets=np.column_stack([client, label]),
            transOffset=axes.transData,
            facecolors=SPLIT_COLOURS[0],
            linewidths=0,
        )
    )
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    axes.set_title(f"area: samples; the largest bubble is {counts.max():,}", fontsize="small", loc="right")


def _heat_map(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.ticker import NullLocator

    # From a blue that differs from the white of no samples.
    blues = colormaps["Blues"](np.linspace(0.2, 1, 256))
    colours = ListedColormap(blues).with_extremes(bad="white")
    shown = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(
        shown, aspect="auto", interpolation="nearest", cmap=colours, norm=LogNorm(1, max(2, counts.max()))
    )
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40, format="{x:,.0f}")
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.set_label("samples (white: none)")


def _few_ticks(axes: Axes, classes: int, names: tuple[str, ...] | None) -> None:
    """Not more labels than can be read; the clients' own names where there are few."""
    step = -(-classes // _MOST_TICKS)
    axes.set_yticks(np.arange(0, classes, step))
    if names is None:
        axes.tick_params(labelbottom=False, bottom=False)
        return
    step = -(-len(names) // _MOST_TICKS)
    shown = range(0, len(names), step)
    longest = max(len(names[client]) for client in shown)
    texts = [names[client] if len(names[client]) <= 14 else f"{names[client][:13]}…" for client in shown]
    axes.set_xticks(list(shown), texts, rotation=0 if longest <= 3 else 90)


def _sizes(axes: Axes, sizes: np.ndarray) -> None:
    """Stacked bars, or filled steps where bars would be thinner than a pixel.

    Args:
        axes: to draw on.
        sizes: samples by client, in the order of the splits, and last training samples without a label; (K, 4).
    """
    clients = np.arange(len(sizes))
    edges = np.arange(len(sizes) + 1) - 0.5
    base = np.zeros(len(sizes))
    parts = (*SPLITS, UNLABELLED)
    for split, column, colour in zip(parts, sizes.T, (*SPLIT_COLOURS, _UNLABELLED), strict=True):
        if not column.any():
            continue
        if len(sizes) <= _MOST_BUBBLES:
            axes.bar(clients, column, bottom=base, width=0.8, color=colour, label=split)
        else:
            axes.stairs(base + column, edges, baseline=base, fill=True, color=colour, label=split)
        base = base + column
    axes.set(ylabel="samples", ylim=(0, max(1, base.max()) * 1.05))
    axes.tick_params(labelbottom=False)
    axes.legend(fontsize="small", ncols=len(parts), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
