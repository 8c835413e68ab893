"""RandAugment: some operations on each image, drawn from fourteen, and a grey square (Cutout).

Operations and the ranges of their magnitudes are those of FixMatch (Sohn et al., NeurIPS 2020, appendix): each time an
operation is drawn, so is its magnitude. Places of pixels move by nearest pixels, and black comes in from outside.
Results have the same bits wherever and in whatever batch an image is changed: counts are those of whole numbers, and
all else is made of sums and products by pixel in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.colours import brightness, mean_brightness, wide
from rayfl.data.images.places import within

OPERATIONS = (
    "identity",
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
_RANGES = {
    "posterize": (4.0, 8.0),
    "solarize": (0.0, 1.0),
    "brightness": (0.05, 0.95),
    "contrast": (0.05, 0.95),
    "color": (0.05, 0.95),
    "sharpness": (0.05, 0.95),
    "rotate": (-30.0, 30.0),
    "shear_x": (-0.3, 0.3),
    "shear_y": (-0.3, 0.3),
    "translate_x": (-0.3, 0.3),
    "translate_y": (-0.3, 0.3),
}
"""Least and greatest magnitude: bits that stay; values; factors; degrees; pixels a row or column; shares of a side."""
_LEVELS = 256


def draw(
    generator: np.random.Generator, count: int, operations: int, cutout: float, sides: tuple[int, int]
) -> dict[str, Tensor]:
    """Draws the operations of ``count`` images.

    Args:
        generator: the stream of a client, round and pass.
        count: how many images.
        operations: how many operations each image has, one after the other.
        cutout: largest side of the grey square, as a share of the image's width.
        sides: height and width in pixels.

    Returns:
        With operations ``operation`` int64 of shape (count, operations), places in :data:`OPERATIONS`, ``amount``
        float32 of the same shape, and ``affine`` float64 of shape (count, operations, 6): where a pixel comes from, as
        a matrix of rows and columns from the middle, row by row, and what is added. With a square ``square`` int64 of
        shape (count, 4): first row and column, and those after the last.
    """
    drawn: dict[str, Tensor] = {}
    if operations:
        kind = generator.integers(len(OPERATIONS), size=(count, operations))
        bounds = np.array([_RANGES.get(name, (0.0, 0.0)) for name in OPERATIONS])[kind]
        amount = bounds[..., 0] + generator.random((count, operations)) * (bounds[..., 1] - bounds[..., 0])
        drawn["operation"] = torch.from_numpy(kind)
        drawn["amount"] = torch.from_numpy(amount.astype(np.float32))
        drawn["affine"] = torch.from_numpy(_affine(kind, amount, sides))
    if cutout:
        size = np.floor(generator.uniform(0, cutout, count) * sides[1])
        middle = generator.random((count, 2)) * sides
        first = np.floor(middle - size[:, None] / 2)
        drawn["square"] = torch.from_numpy(np.concatenate([first, first + size[:, None]], 1).astype(np.int64))
    return drawn


def _affine(kind: np.ndarray, amount: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
    """Returns where pixels come from; see :func:`draw`."""
    found = np.zeros((*kind.shape, 6))
    found[..., 0] = found[..., 3] = 1
    angle = np.deg2rad(np.where(kind == OPERATIONS.index("rotate"), amount, 0))
    found[..., 0] = found[..., 3] = np.cos(angle)
    found[..., 1], found[..., 2] = -np.sin(angle), np.sin(angle)
    for name, place, scale in (
        ("shear_y", 1, 1),
        ("shear_x", 2, 1),
        ("translate_y", 4, sides[0]),
        ("translate_x", 5, sides[1]),
    ):
        chosen = kind == OPERATIONS.index(name)
        found[chosen, place] = amount[chosen] * scale
    return found


def changed(x: Tensor, drawn: Mapping[str, Tensor], black: Tensor, white: Tensor) -> Tensor:
    """Returns images after their operations, and then with their squares.

    Args:
        x: shape (n, channels, rows, columns), of 1 or 3 channels.
        drawn: see :func:`draw`; without any of its names the images stay as they are.
        black: value of a black pixel by channel, shape (channels,).
        white: value of a white one.
    """
    lowest, span = black[:, None, None], (white - black)[:, None, None]
    if "operation" in drawn:
        plain = ((x - lowest) / span).clamp(0, 1)
        for number in range(drawn["operation"].shape[1]):
            kind, amount = drawn["operation"][:, number], drawn["amount"][:, number].to(x)
            plain = _moved(_recoloured(plain, kind, amount), drawn["affine"][:, number])
        x = plain * span + lowest
    if "square" in drawn:
        first_row, first_column, end_row, end_column = (one[:, None, None] for one in drawn["square"].unbind(1))
        row = torch.arange(x.shape[2], device=x.device)[None, :, None]
        column = torch.arange(x.shape[3], device=x.device)[None, None, :]
        inside = (row >= first_row) & (row < end_row) & (column >= first_column) & (column < end_column)
        x = torch.where(inside[:, None], (lowest + span / 2).expand_as(x), x)
    return x


def _recoloured(plain: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    """Returns images of values from 0 to 1, of which those with an operation on values have theirs."""
    factor, grey = wide(amount), brightness(plain)
    found = plain
    for name, made in (
        ("autocontrast", _stretched(plain)),
        ("equalize", _equalized(plain)),
        ("posterize", _posterized(plain, amount)),
        ("solarize", torch.where(plain >= factor, 1 - plain, plain)),
        ("brightness", plain * factor),
        ("contrast", plain * factor + mean_brightness(plain) * (1 - factor)),
        ("color", plain * factor + grey * (1 - factor)),
        ("sharpness", plain * factor + _smooth(plain) * (1 - factor)),
    ):
        found = torch.where(wide(kind == OPERATIONS.index(name)), made, found)
    return found.clamp(0, 1)


def _stretched(plain: Tensor) -> Tensor:
    """Returns images whose channels go from 0 to 1, if they are not all of one value."""
    least, most = plain.amin((2, 3), keepdim=True), plain.amax((2, 3), keepdim=True)
    span = most - least
    return torch.where(span > 0, (plain - least) / torch.where(span > 0, span, 1), plain)


def _levels(plain: Tensor) -> Tensor:
    return (plain * (_LEVELS - 1)).round().long()


def _equalized(plain: Tensor) -> Tensor:
    """Returns images with a flat histogram of 256 levels in each channel, as the library Pillow makes them.

    With s the number of pixels but those of the highest level, over 255 and rounded down, level v becomes the number of
    pixels below it, plus s / 2, over s, at most 255. Where s is 0, as in very small images, nothing changes.
    """
    count, channels, height, width = plain.shape
    levels = _levels(plain).view(count * channels, height * width)
    histogram = torch.zeros(count * channels, _LEVELS, dtype=torch.int64, device=plain.device)
    histogram.scatter_add_(1, levels, torch.ones_like(levels))
    highest = histogram.gather(1, levels.amax(1, keepdim=True))
    step = (height * width - highest) // (_LEVELS - 1)
    below = histogram.cumsum(1) - histogram
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=_LEVELS - 1)
    flat = table.gather(1, levels).to(plain.dtype) / (_LEVELS - 1)
    return torch.where(step > 0, flat, plain.view(levels.shape)).view(plain.shape)


def _posterized(plain: Tensor, bits: Tensor) -> Tensor:
    """Returns images of 2^b levels a channel; b is ``bits``, rounded down."""
    width = wide(2 ** (8 - bits.clamp(0, 8).floor()).long())
    return (_levels(plain) // width * width).to(plain.dtype) / (_LEVELS - 1)


def _smooth(plain: Tensor) -> Tensor:
    """Returns images smoothed by the filter (1 1 1, 1 5 1, 1 1 1) / 13, whose edges stay as they are."""
    found = plain.clone()
    height, width = plain.shape[2:]
    if height < 3 or width < 3:
        return found
    total = 4 * plain[:, :, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + plain[:, :, row : height - 2 + row, column : width - 2 + column]
    found[:, :, 1:-1, 1:-1] = total / 13
    return found


def _moved(plain: Tensor, affine: Tensor) -> Tensor:
    """Returns images whose pixels come from elsewhere, by nearest pixels; black where that is outside."""
    count, channels, height, width = plain.shape
    own = affine[:, :, None, None].unbind(1)
    down = (torch.arange(height, device=plain.device, dtype=torch.float64) - (height - 1) / 2)[None, :, None]
    right = (torch.arange(width, device=plain.device, dtype=torch.float64) - (width - 1) / 2)[None, None, :]
    row = (own[0] * down + own[1] * right + own[4] + (height - 1) / 2 + 0.5).floor().long()
    column = (own[2] * down + own[3] * right + own[5] + (width - 1) / 2 + 0.5).floor().long()
    place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(count, 1, height * width)
    found = plain.reshape(count, channels, -1).gather(2, place.expand(-1, channels, -1)).view(plain.shape)
    return found * within(row, column, height, width)[:, None].to(plain.dtype)
