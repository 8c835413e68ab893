"""Charts that a page's script draws in place of a picture, so that a reader can look into them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DIGITS = 6
"""Significant digits of the numbers in a page; files beside it have all."""


@dataclass(frozen=True)
class Axis:
    """What a reader may choose for the horizontal axis; ``whole``: its ticks are integers."""

    label: str
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Series:
    """A curve, or the points of one.

    Attributes:
        label: for the legend.
        x: an array of shape (T,) for each axis of the chart; None where it is not known.
        y: shape (T,).
        edges: lower and upper edge of a band, shape (T,) each; None: no band.
        names: what each point is; empty where the axis says it.
        clients: the client of each point, whose details a click opens; empty where points are no clients.
    """

    label: str
    x: Sequence[np.ndarray | None]
    y: np.ndarray
    edges: tuple[np.ndarray, np.ndarray] | None = None
    names: Sequence[str] = ()
    clients: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Chart:
    """A chart with lines.

    Attributes:
        axes: what the horizontal axis may be.
        label: of the vertical axis.
        digits: of values, behind the point.
        series: in the order of their colours.
        points: whether every point is marked.
        bounds: least and largest value of the vertical axis; None where the data decide.
    """

    axes: Sequence[Axis]
    label: str
    digits: int
    series: Sequence[Series]
    points: bool = False
    bounds: tuple[float | None, float | None] = (None, None)

    def as_json(self) -> str:
        """Returns the chart as JSON that can stand in a page."""
        return in_page(
            {
                "axes": [{"label": axis.label, "whole": axis.whole} for axis in self.axes],
                "label": self.label,
                "digits": self.digits,
                "points": self.points,
                "bounds": list(self.bounds),
                "series": [
                    {
                        "label": one.label,
                        "x": [None if x is None else rounded(x) for x in one.x],
                        "y": rounded(one.y),
                        "edges": None if one.edges is None else [rounded(edge) for edge in one.edges],
                        "names": list(one.names),
                        "clients": list(one.clients),
                    }
                    for one in self.series
                ],
            }
        )


def in_page(content: Any) -> str:
    """Returns plain data as JSON without what could end a script's element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def rounded(values: np.ndarray) -> list[float | int | None]:
    """Returns numbers with :data:`_DIGITS` significant digits; None for what is not finite."""
    found = [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value.is_integer() else value for value in found]
