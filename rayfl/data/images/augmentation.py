"""Random changes of images: places of pixels, and colours.

A change of places is a gather of pixels without interpolation, so an augmented image has the same bits wherever and in
whatever batch it is made, and its mask, if it has one, is that of the same pixels. Colours: :mod:`.colours`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images import colours, operations, patches
from rayfl.data.images.places import mirrored, turned, windowed, within
from rayfl.metrics.language import IGNORED

if TYPE_CHECKING:
    from rayfl.data.images.augment import AugmentConfig

_WHOLE = {"shift", "flip", "turn", "area", "jittered", "grey", "blurred", "operation", "square"}
"""Kinds of random numbers that change whole images."""
_RATIO = np.log(4 / 3)
"""Logarithm of the largest ratio of a window's sides."""


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Random changes of images of one kind.

    Attributes:
        config: which changes.
        black: value of a black pixel by channel, shape (channels,).
        of_masks: whether targets are masks, which change with their images.
        white: value of a white pixel by channel; None: 1 more than that of a black one.
        sides: height and width of images in pixels.
        views: how many changed images are made of each; with more than one, these are an axis after that of images.
    """

    config: AugmentConfig
    black: Tensor
    of_masks: bool = False
    white: Tensor | None = None
    sides: tuple[int, int] = (0, 0)
    views: int = 1

    def on(self, device: torch.device) -> Augmentation:
        """Returns the augmentation of images on a device: sending a black pixel there in each step would be a wait."""
        white = None if self.white is None else self.white.to(device)
        return replace(self, black=self.black.to(device), white=white)

    def draw(self, generator: np.random.Generator, count: int) -> dict[str, Tensor]:
        """Random numbers of ``count`` images, by kind of change; rows are images.

        Args:
            generator: the stream ``augment`` of a client, round and pass.
            count: how many images are seen.

        Returns:
            ``shift`` int64 of shape (count, 2), ``flip`` bool of shape (count,), ``turn`` float64 of shape (count, 2)
            with cosine and sine, ``area`` float64 of shape (count, 4) with its top, left, height and width as shares
            of the sides, as far as the configuration has them; and what :func:`patches.draw`, :func:`colours.draw` and
            :func:`operations.draw` give. With several views of an image all have an axis of views after the first.
        """
        drawn = self._draw(generator, count * self.views)
        if self.views == 1:
            return drawn
        return {name: values.view(count, self.views, *values.shape[1:]) for name, values in drawn.items()}

    def _draw(self, generator: np.random.Generator, count: int) -> dict[str, Tensor]:
        drawn: dict[str, Tensor] = {}
        if self.config.crop:
            drawn["shift"] = torch.from_numpy(generator.integers(-self.config.crop, self.config.crop + 1, (count, 2)))
        if self.config.flip:
            drawn["flip"] = torch.from_numpy(generator.random(count) < 0.5)
        if self.config.rotate:
            angles = np.deg2rad(generator.uniform(-self.config.rotate, self.config.rotate, count))
            drawn["turn"] = torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], axis=1))
        if self.config.patch is not None:
            drawn |= patches.draw(generator, count, len(self.config.patch), self.config.foreground)
        if self.config.resized_crop < 1:
            drawn["area"] = torch.from_numpy(_windows(generator, count, self.config.resized_crop))
        config = self.config
        drawn |= colours.draw(generator, count, config.jitter, config.grayscale, config.blur, self.sides)
        return drawn | operations.draw(generator, count, config.operations, config.cutout, self.sides)

    def __call__(self, x: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Changed images, in fresh memory: rotated, shifted, cut out and stretched, mirrored, then their colours.

        Operations drawn at random come after these, and a grey square last. Whole ones, also with patches.

        Args:
            x: images of shape (n, channels, rows, columns).
            drawn: see :meth:`draw`, of n images and one view each, on the device of ``x``.
        """
        black = self.black.to(x)
        white = black + 1 if self.white is None else self.white.to(x)
        coloured = colours.changed(self._moved(x, drawn, black), drawn, black, white)
        return operations.changed(coloured, drawn, black, white)

    def both(self, x: Tensor, y: Tensor, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Changed images, and their targets: masks are changed alike, and count nowhere outside of the old image.

        Patches are cut out last.

        Args:
            x: see :meth:`__call__`.
            y: the images' targets; masks have the shape (n, rows, columns).
            drawn: see :meth:`draw`.

        Returns:
            Images, and targets; with several views images of shape (n, views, channels, rows, columns).
        """
        if self.views > 1:
            found = self(x.repeat_interleave(self.views, 0), {name: one.flatten(0, 1) for name, one in drawn.items()})
            return found.view(len(x), self.views, *x.shape[1:]), y
        if self.config.patch is None or drawn.keys() & _WHOLE:
            y = self._moved(y[:, None], drawn, y.new_full((1,), IGNORED))[:, 0] if self.of_masks else y
            x = self(x, drawn)
        return (x, y) if self.config.patch is None else patches.cut(x, y, self.config.patch, drawn)

    def _moved(self, x: Tensor, drawn: Mapping[str, Tensor], outside: Tensor) -> Tensor:
        """Maps of shape (n, channels, rows, columns), changed; ``outside`` is what is beyond them, by channel."""
        count, channels, height, width = x.shape
        # where each pixel of the result comes from, from the last change back to the first
        row = torch.arange(height, device=x.device)[None, :, None].expand(count, height, width)
        column = torch.arange(width, device=x.device)[None, None, :].expand(count, height, width)
        inside = None
        if "flip" in drawn:
            column = torch.where(drawn["flip"][:, None, None], width - 1 - column, column)
        if "area" in drawn:
            row, column = windowed(row, column, drawn["area"], height, width)
        if "shift" in drawn:
            shift = drawn["shift"][:, :, None, None]
            row, column = row + shift[:, 0], column + shift[:, 1]
            if self.config.padding == "reflect":
                row, column = mirrored(row, height), mirrored(column, width)
            else:
                inside = within(row, column, height, width)
        if "turn" in drawn:
            row, column = turned(row, column, drawn["turn"], height, width)
            hit = within(row, column, height, width)
            inside = hit if inside is None else inside & hit
        place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        place = place.view(count, 1, height * width).expand(count, channels, height * width)
        found = x.reshape(count, channels, height * width).gather(2, place).view(x.shape)
        if inside is None:
            return found
        return torch.where(inside[:, None], found, outside[:, None, None])


def _windows(generator: np.random.Generator, count: int, least: float) -> np.ndarray:
    """Draws windows: area uniform from ``least`` to 1, the logarithm of the ratio of sides and the place uniform.

    Returns:
        Top, left, height and width as shares of an image's sides, shape (count, 4).
    """
    area, ratio = generator.uniform(least, 1, count), np.exp(generator.uniform(-_RATIO, _RATIO, count))
    height, width = np.minimum(np.sqrt(area / ratio), 1), np.minimum(np.sqrt(area * ratio), 1)
    top, left = generator.random(count) * (1 - height), generator.random(count) * (1 - width)
    return np.stack([top, left, height, width], 1)
