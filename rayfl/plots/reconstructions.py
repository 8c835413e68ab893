"""Samples above what an attack made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rayfl.plots.style import COLOURS, new_figure
from rayfl.runs.inversion import Inverted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 16
"""Samples of a figure; it has the first of them."""
_PANEL, _HEIGHT = 1.0, 2.6
"""Width of a panel, and height of the figure, in inches."""
_LEAST_WIDTH = 3.0


def draw(found: Inverted, title: str) -> Figure:
    """Draws the originals in a line above their reconstructions; of a volume, the middle slice of its last axis.

    Args:
        found: what an attack found.
        title: of the figure.
    """
    count = min(len(found.places), MOST)
    figure = new_figure(max(_LEAST_WIDTH, _PANEL * count + 0.6), _HEIGHT)
    figure.suptitle(title)
    for line, (name, samples) in enumerate((("original", found.originals), ("found", found.found))):
        for place in range(count):
            axes = figure.add_subplot(2, count, line * count + place + 1)
            _sample(axes, samples[place], found.images)
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if place == 0:
                axes.set_ylabel(name)
            axes.set_title(f"class {found.labels[place]}" if line == 0 else f"MSE {found.errors[place]:.2g}")
    return figure


def _sample(axes: Axes, x: np.ndarray, images: bool) -> None:
    """Three channels are colours; of others the first is drawn. Vectors are curves."""
    if not images:
        axes.plot(x, color=COLOURS[0], linewidth=1)
        return
    plane = np.clip(x[..., x.shape[-1] // 2] if x.ndim == 4 else x, 0, 1)
    if len(plane) == 3:
        axes.imshow(np.moveaxis(plane, 0, -1), interpolation="nearest")
    else:
        axes.imshow(plane[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
