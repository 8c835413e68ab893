"""One style for all figures, the files they are saved as, and pictures in a page that follow its colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfl.data.files.whole import new_file
from rayfl.plots.style import COLOURS, COMMON, SPLIT_COLOURS
from rayfl.report.charts import Chart
from rayfl.results.plain_csv import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, PAPER, GRID, FAINT = "#1c1d1f", "#fefefe", "#dcdde0", "#8a8d93"
FORMATS = ("png", "svg", "pdf")
_DPI = 150
"""Dots an inch of PNG, and of images within the others."""
_LEGEND_HANDLE_IN, _LEGEND_CHARACTER_IN, _LEGEND_LINE_IN = 0.5, 0.072, 0.18
"""About how much room an entry of a legend takes, in inches."""
_VARIABLES = {
    INK: "ink",
    PAPER: "paper",
    GRID: "grid",
    FAINT: "faint",
    **{colour: f"series-{number}" for number, colour in enumerate(COLOURS)},
    **{colour: f"split-{number}" for number, colour in enumerate(SPLIT_COLOURS)},
    "#000000": "ink",
    "#ffffff": "paper",
    "#ebebeb": "grid",
    "#cccccc": "grid",
}
"""Names of the page's colours by those that are drawn with."""
_STYLE: Any = {
    **COMMON,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "legend.fontsize": 8.5,
}
_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
"""Equal figures give equal files."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure of a report.

    Attributes:
        name: of its files, without ending.
        title: its heading.
        caption: what is to be seen, how it was computed, and for people who do not see it what it shows.
        figure: the figure.
        data: what it shows, as a table.
        chart: what the page's script draws in its place; None where there is only the picture.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    data: pa.Table
    chart: Chart | None = None

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG document: drawn once, for the page and for the file."""
        buffer = io.StringIO()
        with styled():
            _laid_out(self.figure).savefig(buffer, format="svg", dpi=_DPI, metadata=_NO_DATE["svg"])
        return buffer.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Figures made in this block have the style of reports."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def save(drawing: Drawing, folder: Path) -> None:
    """Writes ``<name>.png``, ``.svg``, ``.pdf`` and the data as ``<name>.csv``.

    Raises:
        DataError: a file cannot be written.
    """
    for ending in FORMATS:
        with new_file(folder / f"{drawing.name}.{ending}") as file, styled():
            if ending == "svg":
                file.write(drawing.svg.encode())
            else:
                _laid_out(drawing.figure).savefig(file, format=ending, dpi=_DPI, metadata=_NO_DATE[ending])
    save_table(drawing.data, folder / f"{drawing.name}.csv")


def save_table(table: pa.Table, destination: Path) -> None:
    """Writes a table as CSV.

    Raises:
        DataError: the file cannot be written.
    """
    with new_file(destination) as file:
        write_csv(table, file)


def inline_svg(drawing: Drawing) -> str:
    """Returns the figure as an SVG element; the page defines the colours ``--ink``, ``--paper``, ``--series-0`` ...

    Its ids are unique among figures of different names, and it refers to nothing outside.
    """
    text = drawing.svg[drawing.svg.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{drawing.name}-", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _colour(found.group()), text)
    width = re.search(r'width="([\d.]+)pt"', text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    size = f' style="max-width: {1.333 * float(width[1]):.0f}px"' if width else ""
    return text.replace("<svg ", f'<svg{size} role="img" aria-labelledby="{drawing.name}-title" ', 1)


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Draws a legend above all panels, in at most four columns and as many as fit; the figure grows by its lines."""
    widest = _LEGEND_HANDLE_IN + _LEGEND_CHARACTER_IN * max(map(len, labels))
    columns = max(1, min(4, len(labels), int(figure.get_figwidth() / widest)))
    more = -(-len(labels) // columns) - -(-len(labels) // 4)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_IN * more)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def table_of(columns: Mapping[str, object]) -> pa.Table:
    """Returns a table of columns of equal length."""
    return pa.table({name: pa.array(list(values)) for name, values in columns.items()})  # type: ignore[call-overload]


def _laid_out(figure: Figure) -> Figure:
    """Returns the figure with its parts put in place once, not for each file: that takes most of the time."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
    return figure


def _colour(drawn: str) -> str:
    name = _VARIABLES.get(drawn)
    return drawn if name is None else f"var(--{name})"
