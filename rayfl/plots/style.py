"""The look of all figures: colours that everybody can tell apart, fonts and widths of papers, how a curve is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.errors import ConfigError
from rayfl.naming.spelling import nearest
from rayfl.tracking.plain_text import PLAIN_TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = ("#0b62a8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0e7490", "#57534e")
"""Of series, in plots and reports: told apart in colour vision deficiencies as far as eight can be, and dark enough for
lines on white. Pages show others in their place in the dark (``report/templates/style.css``)."""
SPLIT_COLOURS = ("#2f6db5", "#8fb8de", "#e08a3c")
"""Colours of the splits train, validation and test."""
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_MARKED = 40
"""Longer curves have no markers, or some where colours come again."""
_MARKS = 10
"""How many of them these have."""
SEQUENTIAL = "viridis"
"""The colour map of values; its order survives grey printing."""

LAMBDA, MU, NU, RHO, TAU, THETA, DELTA_T = (
    "\N{GREEK SMALL LETTER LAMDA}",
    "\N{GREEK SMALL LETTER MU}",
    "\N{GREEK SMALL LETTER NU}",
    "\N{GREEK SMALL LETTER RHO}",
    "\N{GREEK SMALL LETTER TAU}",
    "\N{GREEK SMALL LETTER THETA}",
    "\N{GREEK SMALL LETTER DELTA}\N{LATIN SUBSCRIPT SMALL LETTER T}",
)
"""The papers' symbols. Matplotlib's formulas are switched off, for the sake of names that look like some."""

_LEGEND_HANDLE_IN, _LEGEND_CHARACTER_IN, _LEGEND_SERIF_IN = 0.65, 0.075, 0.056
"""About how much room an entry of a legend takes, in inches at 9 points; papers' letters are narrower."""
_TITLE_LETTERS = 10 / 9
"""How much larger the letters of titles are."""
_LEGEND_LINES, _LEGEND_LINE_IN = 3, 0.2
"""How many lines of a legend figures have room for, and the height of one in inches at 9 points."""

COMMON: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 3.2,  # long enough to tell dashes apart
    "svg.fonttype": "none",
    **PLAIN_TEXT,
    "svg.hashsalt": "rayfl",
}
"""Matplotlib's settings for every figure, of plots and of reports."""

_STYLE: Any = {
    **COMMON,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": "0.9",
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # Text stays text: journals refuse Type 3 fonts.
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Size:
    """The size of a figure in a paper.

    Attributes:
        width: of the column or of the text, in inches.
        font: size of labels in points; ticks and legends are one point smaller.
    """

    width: float
    font: float


SIZES = {
    "icml-column": Size(3.25, 8),
    "icml": Size(6.75, 8),
    "neurips": Size(5.5, 9),
    "iclr": Size(5.5, 9),
    "aistats-column": Size(3.25, 8),
    "cvpr-column": Size(3.25, 8),
    "cvpr": Size(6.875, 8),
    "aaai-column": Size(3.3, 8),
    "aaai": Size(7.0, 8),
    "ieee-column": Size(3.5, 8),
    "ieee": Size(7.16, 8),
    "jmlr": Size(6.0, 9),
}
"""Widths by venue, from memory: look at the style file for a figure that must fit. Fonts are STIX, which looks like the
Times of these styles and comes with Matplotlib, so that a figure is the same on every machine; the
subscripts that STIX lacks are of DejaVu Serif, which comes with it too."""

_size: ContextVar[Size | None] = ContextVar("size", default=None)
_FLATTER = 0.7
"""A figure that becomes n times as wide becomes n^0.7 times as high: labels keep their size and need their room."""


def size_of(name: str) -> Size:
    """Returns the size of a name; raises ConfigError, naming all, when there is none."""
    if name not in SIZES:
        raise ConfigError(f"--size: there is no {name!r}{nearest(name, SIZES)}; there are {', '.join(SIZES)}")
    return SIZES[name]


@contextmanager
def paper_style(size: Size | None = None) -> Iterator[None]:
    """Inside, figures are drawn and must be saved.

    Args:
        size: what figures are made for; None: sizes that suit a screen, without serifs.
    """
    import matplotlib

    token = _size.set(size)
    try:
        with matplotlib.rc_context(_STYLE | ({} if size is None else _printed(size))):
            yield
    finally:
        _size.reset(token)


def _printed(size: Size) -> dict[str, Any]:
    small = dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), size.font - 1)
    large = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), size.font)
    lines = {"lines.linewidth": 1.2, "lines.markersize": 3, "axes.linewidth": 0.6, "grid.linewidth": 0.5}
    return {"font.family": ["STIXGeneral", "DejaVu Serif"], **large, **small, **lines}


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure.

    Args:
        width: in inches, unless :func:`paper_style` has a size.
        height: in inches for that width.
    """
    from matplotlib.figure import Figure

    size = _size.get()
    if size is not None:
        width, height = size.width, height * (size.width / width) ** _FLATTER
    return Figure(figsize=(width, height), layout="constrained")


def columns_for(panels: int, least: float) -> int:
    """Returns how many panels of a figure have room side by side.

    Args:
        panels: of the figure.
        least: width in inches below which a panel's labels would cover each other.
    """
    size = _size.get()
    return panels if size is None else max(1, min(panels, int(size.width / least)))


def new_panels(panels: int, each: float, height: float, least: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure with panels side by side, or in several lines if they would be too narrow.

    Args:
        panels: how many.
        each: width of one in inches, unless :func:`paper_style` has a size.
        height: of one in inches for that width.
        least: width in inches below which a line has fewer panels.
    """
    columns = columns_for(panels, least)
    lines = -(-panels // columns)
    figure = new_figure(each * columns, height)
    if lines > 1:
        figure.set_figheight(figure.get_figheight() * lines)
    return figure, [figure.add_subplot(lines, columns, position + 1) for position in range(panels)]


def ink_on(image: AxesImage, value: float) -> str:
    """Returns the colour in which a cell's number can be read on the colour of its value."""
    red, green, blue, _ = image.cmap(image.norm(np.asarray(value)))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


def colour(position: int) -> str:
    """Returns the colour of the n-th series."""
    return COLOURS[position % len(COLOURS)]


def marker(position: int) -> str:
    """Returns the marker of the n-th series; with the colour it tells 64 series apart."""
    return MARKERS[(position + position // len(COLOURS)) % len(MARKERS)]


def dashes(position: int) -> str:
    """Returns the dashes of the n-th series: solid lines until colours come again."""
    return DASHES[position // len(COLOURS) % len(DASHES)]


def draw_curve(
    axes: Axes,
    position: int,
    label: str,
    x: np.ndarray,
    y: np.ndarray,
    spread: np.ndarray | None = None,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    linestyle: str | None = None,
) -> None:
    """Draws the curve of a series, with a band of ``y - spread`` to ``y + spread``.

    Args:
        axes: to draw on.
        position: of the series; decides on colour, dashes and marker.
        label: for the legend.
        x: shape (T,).
        y: shape (T,).
        spread: shape (T,); None, or no finite value: no band.
        bounds: what values can be, see :func:`bounds_of`; a band goes no further.
        linestyle: in place of the series' own.
    """
    long, again = len(x) > MOST_MARKED, position >= len(COLOURS)
    axes.plot(
        x,
        y,
        color=colour(position),
        linestyle=dashes(position) if linestyle is None else linestyle,
        marker="" if long and not again else marker(position),
        markevery=-(-len(x) // _MARKS) if long else None,
        label=label,
    )
    if spread is not None and np.isfinite(spread).any():
        axes.fill_between(x, *band(y, spread, bounds), color=colour(position), alpha=0.18, linewidth=0)


def band(y: np.ndarray, spread: np.ndarray, bounds: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the edges of the band ``y - spread`` to ``y + spread`` within bounds, shape (T,) each.

    A mean that is itself beyond a bound, as the loss of a task of one's own may be, is its own edge.
    """
    low, high = bounds
    return np.maximum(y - spread, np.minimum(y, low)), np.minimum(y + spread, np.maximum(y, high))


def legend_below(figure: Figure, axes: Axes) -> None:
    """Draws one legend for all panels below them, in as many columns as fit; a figure grows by lines beyond three."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or (labels and len(figure.axes) > 1):
        scale, character = _letters()
        widest = scale * (_LEGEND_HANDLE_IN + character * max(map(len, labels)))
        columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
        more = max(0, -(-len(labels) // columns) - _LEGEND_LINES)
        figure.set_figheight(figure.get_figheight() + scale * _LEGEND_LINE_IN * more)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def wrapped(label: str, width: float) -> str:
    """Returns a label in lines that are at most this many inches wide in the letters of titles."""
    scale, character = _letters()
    return fill(label, max(1, int(width / (scale * character * _TITLE_LETTERS))))


def _letters() -> tuple[float, float]:
    """Returns how large a legend's letters are, 1 at 9 points, and the width of one then in inches."""
    size = _size.get()
    if size is None:
        return 1, _LEGEND_CHARACTER_IN
    return (size.font - 1) / _STYLE["legend.fontsize"], _LEGEND_SERIF_IN


def subscript(number: int) -> str:
    """Returns a number as subscript digits."""
    return "".join(chr(ord("\N{SUBSCRIPT ZERO}") + int(digit)) for digit in str(number))


def whole_numbers(axes: Axes) -> None:
    """Makes the ticks of the horizontal axis integers, as rounds are."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
