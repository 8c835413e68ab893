"""No text of a figure is cut off, covers another or lacks a letter, on a screen and at the widths of papers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from rayfl.errors import ConfigError
from rayfl.plots.kinds import KINDS
from rayfl.plots.output import write_plot
from rayfl.plots.style import COLOURS, SIZES, draw_curve, legend_below, new_figure, paper_style
from tests.plots.conftest import Runs

Wanted = list[tuple[str, dict[str, Any]]]

_SIMPLEX = {"algorithm.simplex_dimension": 2, "algorithm.assignment_round": 1}
_FIGURES: dict[str, tuple[Wanted, dict[str, Any]]] = {
    "curves": ([("superfed-mm", {}), ("superfed-mm", {"seed": 1}), ("fedavg", {}), ("floco", {})], {}),
    "lambda": ([("superfed-mm", {}), ("superfed-lm", {})], {}),
    "ablation": ([("superfed-mm", {"algorithm.proximal_weight": mu}) for mu in (0.0, 1.0)], {}),
    "landscape": ([("superfed-mm", {})], {"points": 5, "clients": [0, 3]}),
    "simplex": ([("floco", _SIMPLEX)], {"points": 6}),
    "heatmap": ([("floco", {"algorithm.assignment_round": tau, "algorithm.radius": 0.2}) for tau in (1, 2)], {}),
    "variance": ([("fedavg", {}), ("floco", {})], {}),
    "delta": ([(name, {"evaluation.cohort_received": True}) for name in ("fedphp", "fedavg", "superfed-mm")], {}),
    "architectures": ([("fedme", {})], {}),
    "clients": ([("superfed-mm", {}), ("fedavg", {})], {}),
}


def ticks_out_of_sight(figure: Figure) -> Iterator[Text]:
    """Labels that an axis keeps and does not draw; all of a surface, whose places are not those of the page."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis, getattr(axes, "zaxis", None)):
            if axis is None:
                continue
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if hasattr(axes, "zaxis") or not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    yield from (tick.label1, tick.label2)


def faults(figure: Figure) -> list[str]:
    """What is cut off, what covers what by more than a pixel, and which letters the font lacks."""
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        canvas.draw()
    found = [str(warning.message) for warning in warned if "Glyph" in str(warning.message)]
    width, height = canvas.get_width_height()
    page = Bbox([[-1, -1], [width + 1, height + 1]])
    unseen = set(ticks_out_of_sight(figure))
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown if text not in unseen]
    boxes = [(text, box) for text, box in boxes if box.width and box.height]
    found += [f"{text!r} is cut off" for text, box in boxes if not (page.contains(*box.p0) and page.contains(*box.p1))]
    for (text, box), (other, its) in combinations(boxes, 2):
        both = Bbox.intersection(box, its)
        if both is not None and min(both.width, both.height) > 1:
            found.append(f"{text!r} covers {other!r}")
    return found


@pytest.mark.two_cases
@pytest.mark.parametrize(
    "size", ["icml-column", *(pytest.param(size, marks=pytest.mark.slow) for size in ("", "neurips", "icml"))]
)
@pytest.mark.parametrize("kind", _FIGURES)
def test_every_text_can_be_read(made: Runs, kind: str, size: str) -> None:
    wanted, options = _FIGURES[kind]
    runs = [made(method, **overrides) for method, overrides in wanted]
    with paper_style(SIZES[size] if size else None):
        figure, _ = KINDS[kind].draw(runs, **options)
        assert faults(figure) == []


def test_panels_that_a_column_has_no_room_for_are_left_out_or_refused(made: Runs, tmp_path: Path) -> None:
    runs = [made("fedavg"), made("superfed-mm")]
    with paper_style(SIZES["icml-column"]):
        figure, table = KINDS["curves"].draw(runs)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "round"]
    assert "seconds" not in table.column_names
    with pytest.raises(ConfigError, match="this --size has room for 1 of 2 panels"):
        write_plot("landscape", runs, tmp_path / "f.png", size="icml-column", plane="random")


@pytest.mark.parametrize("size", [pytest.param("", marks=pytest.mark.slow), "icml-column"])
@pytest.mark.slow
def test_the_clients_of_more_methods_than_colours_have_panels_of_their_own(made: Runs, size: str) -> None:
    runs = [made("fedprox", **{"algorithm.proximal_weight": mu, "train.rounds": 1}) for mu in range(len(COLOURS) + 1)]
    with paper_style(SIZES[size] if size else None):
        figure, table = KINDS["clients"].draw(runs)
        assert faults(figure) == []
    titles = ["".join(axes.get_title().split()) for axes in figure.axes]  # in lines that fit
    assert titles == ["".join(label.split()) for label in dict.fromkeys(table["series"].to_pylist())]


@pytest.mark.parametrize("size", ["", "icml-column"])
def test_a_long_legend_leaves_the_panels_their_room(size: str) -> None:
    heights = []
    for number in (3, 24):
        with paper_style(SIZES[size] if size else None):
            figure = new_figure(4.6, 3.5)
            axes = figure.subplots()
            for position in range(number):
                draw_curve(axes, position, f"SuPerFed, orthogonality_weight={position}.0", np.arange(3), np.arange(3))
            legend_below(figure, axes)
            assert faults(figure) == []
            heights.append(axes.get_window_extent().height)
    assert heights[1] > 0.9 * heights[0]
