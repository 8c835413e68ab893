"""Places of pixels: where those of a changed image come from."""

from __future__ import annotations

import torch
from torch import Tensor


def mirrored(place: Tensor, size: int) -> Tensor:
    """Places outside of 0..size - 1, by less than size, mirrored at the first or last one."""
    return (size - 1) - ((size - 1) - place.abs()).abs()


def within(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Returns which places are in an image of these sides."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def turned(row: Tensor, column: Tensor, turn: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Places rotated about the middle of the image, to the nearest pixel.

    Args:
        row: shape (n, height, width).
        column: of the same shape.
        turn: cosine and sine of each image, float64 of shape (n, 2).
        height: of the image.
        width: of the image.
    """
    cosine, sine = turn[:, 0, None, None], turn[:, 1, None, None]
    down, right = row - (height - 1) / 2, column - (width - 1) / 2
    back_down = cosine * down - sine * right
    back_right = sine * down + cosine * right
    middle_down, middle_right = (height - 1) / 2, (width - 1) / 2
    return (back_down + middle_down + 0.5).floor().long(), (back_right + middle_right + 0.5).floor().long()


def windowed(row: Tensor, column: Tensor, window: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Places in windows that are stretched to the whole image, to the nearest pixel.

    Args:
        row: shape (n, height, width).
        column: of the same shape.
        window: top, left, height and width of each image's, as shares of its sides, float64 of shape (n, 4).
        height: of the image.
        width: of the image.
    """
    top, left, high, wide = (one[:, None, None] for one in window.unbind(1))
    down = ((row + 0.5) * high + top * height).floor().clamp(0, height - 1)
    right = ((column + 0.5) * wide + left * width).floor().clamp(0, width - 1)
    return down.to(torch.int64), right.to(torch.int64)
