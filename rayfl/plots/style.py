"""How all figures look: colours that everybody can tell apart, fonts that survive a column of a paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayfl.data.partitions.picture import PLAIN_TEXT
from rayfl.errors import ConfigError
from rayfl.results.schemas import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Okabe and Ito's palette for colour-blind readers; its yellow is too faint for lines on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "viridis"
"""The colour map of values; its order survives grey printing."""

LAMBDA, MU, NU, RHO, TAU, THETA, DELTA = (
    "\N{GREEK SMALL LETTER LAMDA}",
    "\N{GREEK SMALL LETTER MU}",
    "\N{GREEK SMALL LETTER NU}",
    "\N{GREEK SMALL LETTER RHO}",
    "\N{GREEK SMALL LETTER TAU}",
    "\N{GREEK SMALL LETTER THETA}",
    "\N{GREEK SMALL LETTER DELTA}",
)
"""The papers' symbols. Matplotlib's formulas are switched off, for the sake of names that look like some."""

_LEGEND_HANDLE_IN, _LEGEND_CHARACTER_IN = 0.5, 0.075
"""About how much room an entry of a legend takes, in inches."""

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # Text stays text: journals refuse Type 3 fonts.
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    **PLAIN_TEXT,
    "svg.hashsalt": "rayfl",
}


@dataclass(frozen=True)
class Measure:
    """How a metric is shown: a label, a factor, and decimals in annotations."""

    label: str
    factor: float
    decimals: int


_MEASURES = {
    "loss": Measure("loss (nats)", 1, 3),
    "top1": Measure("accuracy (%)", 100, 1),
    "top5": Measure("top-5 accuracy (%)", 100, 1),
    "ece": Measure("ECE", 1, 3),
    "mce": Measure("MCE", 1, 3),
}


def measure(metric: str) -> Measure:
    """How a metric is shown; raises ConfigError for an unknown one."""
    if metric not in _MEASURES:
        raise ConfigError(f"--metric: there is no {metric!r}; there are {', '.join(METRICS)}")
    return _MEASURES[metric]


@contextmanager
def paper_style() -> Iterator[None]:
    """Inside, figures are drawn and must be saved."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def colour(position: int) -> str:
    """The colour of the n-th series."""
    return COLOURS[position % len(COLOURS)]


def marker(position: int) -> str:
    """The marker of the n-th series; with the colour it tells 7 series apart, and further ones by their order."""
    return MARKERS[(position + position // len(COLOURS)) % len(MARKERS)]


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, below them, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or (labels and len(figure.axes) > 1):
        widest = _LEGEND_HANDLE_IN + _LEGEND_CHARACTER_IN * max(map(len, labels))
        columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def subscript(number: int) -> str:
    """A number below the line."""
    return "".join(chr(ord("\N{SUBSCRIPT ZERO}") + int(digit)) for digit in str(number))


def whole_numbers(axes: Axes) -> None:
    """Ticks of rounds are whole."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
