"""Patches: windows of images and volumes with masks, cut out at random, or around what is no background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


def draw(generator: np.random.Generator, count: int, dimensions: int, foreground: float) -> dict[str, Tensor]:
    """Draws random numbers of ``count`` patches; rows are patches.

    Args:
        generator: the source of randomness.
        count: how many patches are cut out.
        dimensions: of the images: 2, or 3 of volumes.
        foreground: probability that a patch is cut out around a pixel whose class is not 0.

    Returns:
        ``window`` float64 of shape (count, dimensions) in [0, 1), where a patch is. With foreground also ``around``
        bool of shape (count,), whether it is cut out around such a pixel, and ``pixel`` float64 of shape (count,) in
        [0, 1), around which one.
    """
    drawn = {"window": torch.from_numpy(generator.random((count, dimensions)))}
    if foreground:
        drawn["around"] = torch.from_numpy(generator.random(count) < foreground)
        drawn["pixel"] = torch.from_numpy(generator.random(count))
    return drawn


def cut(x: Tensor, y: Tensor, sides: Sequence[int], drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cuts a patch out of each image and its mask, in fresh memory.

    A patch around a pixel has it in its middle, unless it would reach beyond the image then: it is moved inside. An
    image without such a pixel has a patch at random.

    Args:
        x: images of shape (n, channels, *image sides).
        y: masks of shape (n, *image sides).
        sides: those of a patch, none larger than the image's.
        drawn: see :func:`draw`, of n images, on the device of ``x``.

    Returns:
        Images of shape (n, channels, *sides) and masks of shape (n, *sides).
    """
    room = [own - wanted for own, wanted in zip(y.shape[1:], sides, strict=True)]
    # Plain numbers, axis by axis: a tensor of them would have to be sent to the device. Draws are below 1, and products
    # of float64 are below the count for any number of pixels.
    begin = [(drawn["window"][:, axis] * (most + 1)).long() for axis, most in enumerate(room)]
    if "around" in drawn:
        begin = _around(y, sides, room, drawn, begin)
    places = []
    for axis, size in enumerate(sides):
        shape = [1] * (1 + len(sides))
        shape[0], shape[1 + axis] = len(y), size
        places.append((begin[axis][:, None] + torch.arange(size, device=x.device)).view(shape))
    rows = torch.arange(len(y), device=x.device).view(-1, *[1] * len(sides))
    found = x.movedim(1, -1)[(rows, *places)].movedim(-1, 1)
    return found.contiguous(), y[(rows, *places)]


def _around(
    y: Tensor, sides: Sequence[int], room: Sequence[int], drawn: Mapping[str, Tensor], begin: Sequence[Tensor]
) -> list[Tensor]:
    """Returns by axis where patches begin, int64 of shape (n,): those around a pixel, and the others as they were."""
    ranks = (y > 0).flatten(1).cumsum(1)
    count = ranks[:, -1:]
    wanted = (drawn["pixel"][:, None] * count).long() + 1
    place = torch.searchsorted(ranks, wanted)[:, 0]
    around, found, stride = drawn["around"] & (count[:, 0] > 0), list[Tensor](), ranks.shape[1]
    for axis, own in enumerate(y.shape[1:]):
        stride //= own
        middle = place // stride % own
        inside = (middle - sides[axis] // 2).clamp(0, room[axis])
        found.append(torch.where(around, inside, begin[axis]))
    return found
