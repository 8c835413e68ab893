"""Penalties between two vectors f and l."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rayfl.params import TINY, inner_product, squared_cosine, squared_distance


class Slopes(NamedTuple):
    """The gradient in f is ``cross l + own_first f``, that in l is ``cross f + own_second l``."""

    cross: Any
    own_first: Any
    own_second: Any


class Pair(NamedTuple):
    """A penalty function of two vectors.

    Attributes:
        name: its name in messages.
        value: computes it for two trees; a scalar.
        slopes: coefficients of its gradient; or a function that computes them from <f, l>, |f|^2 and |l|^2; None if the
            gradient is not such a combination.
    """

    name: str
    value: Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]
    slopes: Slopes | Callable[[Any, Any, Any], Slopes] | None = None


def _cosine_slopes(product: Any, first: Any, second: Any) -> Slopes:
    """With q = p^2 / (|f|^2 |l|^2): 2 p / (|f|^2 |l|^2) and -2 q / |f|^2 (Hahn et al., KDD 2022, eqs. 5 and 6)."""
    norms = first * second
    whole = norms > TINY
    safe = norms * whole + TINY * (norms <= TINY)
    own = -2 * product * product / safe * whole
    return Slopes(2 * product / safe, own / (first + TINY * (first <= TINY)), own / (second + TINY * (second <= TINY)))


DISTANCE = Pair("squared_distance", squared_distance, Slopes(-2.0, 2.0, 2.0))
PRODUCT = Pair("inner_product", inner_product, Slopes(1.0, 0.0, 0.0))
COSINE = Pair("squared_cosine", squared_cosine, _cosine_slopes)
