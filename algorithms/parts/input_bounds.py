"""Between which values a client's inputs lie."""

from __future__ import annotations

from torch import Tensor


def bounds_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of inputs, each in the shape of one: of images by channel, else number by number.

    Args:
        x: inputs (n, ...), one at least.
    """
    over = (0, 2, 3) if x.ndim == 4 else (0,)
    low, high = (ends.expand(1, *x.shape[1:])[0].clone() for ends in (x.amin(over, True), x.amax(over, True)))
    return low, high
