"""Random changes of training images: shifts, mirror images, rotations and patches, each a choice of source pixels.

Every change is a gather of pixels without interpolation, so an augmented image has the same bits wherever and in
whatever batch it is made, and its mask, if it has one, is that of the same pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from rayfl.data.images import patches
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics.language import IGNORED

_MOVES = {"shift", "flip", "turn"}
"""Kinds of random numbers that move pixels of whole images."""


class AugmentConfig(BaseModel):
    """Random changes of what clients train on; validation and test parts stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    crop: int = Field(
        default=0,
        ge=0,
        description="Pixels by which images are padded on all four sides before a window of the old size is cut out at "
        "random; 0: none.",
    )
    padding: Literal["black", "reflect"] = Field(
        default="black", description="What the padding of crop holds: black pixels, or the image mirrored at its edge."
    )
    flip: bool = Field(default=False, description="Mirror left and right with probability 1/2.")
    rotate: float = Field(
        default=0.0,
        ge=0,
        le=180,
        description="Largest angle of a random rotation, in degrees; nearest pixels, black corners.",
    )

    patch: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="Sides of a window that is cut at random out of an image or a volume, and its mask; null: none is.",
    )
    foreground: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Probability that a patch is cut out around a pixel, drawn at random, whose class is not 0.",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> AugmentConfig:
        if self.padding != "black" and not self.crop:
            raise ValueError(f"padding={self.padding} is that of crop, which is 0; set crop, for instance to 4")
        if self.foreground and self.patch is None:
            raise ValueError(f"foreground={self.foreground} says where patches are, but there are none; set patch")
        return self

    @property
    def _moves(self) -> bool:
        """Returns whether pixels of whole images change their places."""
        return self.model_copy(update={"patch": None, "foreground": 0.0}).active

    @property
    def active(self) -> bool:
        """Returns whether any image changes."""
        return self != AugmentConfig()

    def build(self, spec: InputSpec, black: np.ndarray) -> Augmentation | None:
        """The augmentation of inputs as the model sees them; None if nothing changes.

        Args:
            spec: the inputs.
            black: value of a black pixel by channel, shape (channels,).

        Raises:
            ConfigError: the inputs are no images of channels, rows and columns (or volumes, for patches alone), or too
                small for crop or for the patches, or windows of series; or patches are asked for and the targets are no
                masks.
        """
        if not self.active:
            return None
        if spec.horizon:
            raise ConfigError(
                "augment: shifted or mirrored windows of series would have another order of time than what follows "
                "them; leave out the section augment"
            )
        if self.patch is not None:
            self._check_patch(self.patch, spec)
        if self._moves and spec.kind == "image" and len(spec.shape) == 4:
            raise ConfigError(
                "augment: volumes can be cut into patches, but not shifted, mirrored or rotated: leave out crop, flip "
                "and rotate"
            )
        if self._moves and (spec.kind != "image" or len(spec.shape) != 3):
            what = (
                f"{spec.kind.removesuffix('s')}s"
                if spec.kind != "image"
                else f"vectors or arrays of the shape {spec.shape}"
            )
            raise ConfigError(
                f"augment: only images (channels, rows, columns) can be augmented, but the inputs are {what}; leave "
                "out the section augment"
            )
        if self.crop and self.crop >= min(spec.shape[1:]):
            at_most = min(spec.shape[1:]) - 1
            done = "can be mirrored" if self.padding == "reflect" else "keep something to see if they are moved"
            raise ConfigError(
                f"augment.crop is {self.crop}, but images of {spec.shape[1]} x {spec.shape[2]} pixels {done} by "
                f"{at_most} at most: make it smaller{', or leave it out' if not at_most else ''}"
            )
        return Augmentation(self, torch.as_tensor(black), spec.target == "mask")

    def trained_on(self, spec: InputSpec) -> InputSpec:
        """Returns what a model sees in training: the data's inputs, or patches of them."""
        return spec if self.patch is None else replace(spec, shape=(spec.shape[0], *self.patch))

    def _check_patch(self, patch: tuple[int, ...], spec: InputSpec) -> None:
        if spec.target != "mask":
            raise ConfigError(
                "augment.patch is for images with a class at each pixel, but the data set has "
                f"{spec.words()}: leave it out"
            )
        if len(patch) != len(spec.shape) - 1 or any(a > b for a, b in zip(patch, spec.shape[1:], strict=True)):
            own, wanted = (" x ".join(map(str, sides)) for sides in (spec.shape[1:], patch))
            raise ConfigError(
                f"augment.patch is {wanted}, but the inputs have the sides {own}: give as many sides, none larger"
            )


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Random changes of images of one kind.

    Attributes:
        config: which changes.
        black: value of a black pixel by channel, shape (channels,).
        of_masks: whether targets are masks, which change with their images.
    """

    config: AugmentConfig
    black: Tensor
    of_masks: bool = False

    def on(self, device: torch.device) -> Augmentation:
        """Returns the augmentation of images on a device: sending a black pixel there in each step would be a wait."""
        return replace(self, black=self.black.to(device))

    def draw(self, generator: np.random.Generator, count: int) -> dict[str, Tensor]:
        """Random numbers of ``count`` images, by kind of change; rows are images.

        Args:
            generator: the stream ``augment`` of a client, round and pass.
            count: how many images are seen.

        Returns:
            ``shift`` int64 of shape (count, 2), ``flip`` bool of shape (count,), ``turn`` float64 of shape (count, 2)
            with cosine and sine, as far as the configuration has them; and what :func:`patches.draw` gives.
        """
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
        return drawn

    def __call__(self, x: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Changed images, in fresh memory: rotated, then shifted, then mirrored; whole ones, also with patches.

        Args:
            x: images of shape (n, channels, rows, columns).
            drawn: see :meth:`draw`, of n images, on the device of ``x``.
        """
        return self._moved(x, drawn, self.black.to(x))

    def both(self, x: Tensor, y: Tensor, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Changed images, and their targets: masks are changed alike, and count nowhere outside of the old image.

        Patches are cut out last.

        Args:
            x: see :meth:`__call__`.
            y: the images' targets; masks have the shape (n, rows, columns).
            drawn: see :meth:`__call__`.
        """
        if self.config.patch is None or drawn.keys() & _MOVES:
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
        if "shift" in drawn:
            shift = drawn["shift"][:, :, None, None]
            row, column = row + shift[:, 0], column + shift[:, 1]
            if self.config.padding == "reflect":
                row, column = _mirrored(row, height), _mirrored(column, width)
            else:
                inside = _within(row, column, height, width)
        if "turn" in drawn:
            row, column = _turned(row, column, drawn["turn"], height, width)
            hit = _within(row, column, height, width)
            inside = hit if inside is None else inside & hit
        place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        place = place.view(count, 1, height * width).expand(count, channels, height * width)
        found = x.reshape(count, channels, height * width).gather(2, place).view(x.shape)
        if inside is None:
            return found
        return torch.where(inside[:, None], found, outside[:, None, None])


@dataclass(frozen=True, eq=False)
class Variations:
    """How the images of one local update are changed.

    Attributes:
        augmentation: the kinds of changes.
        drawn: the random numbers; rows are the images in the order in which the update sees them.
    """

    augmentation: Augmentation
    drawn: Mapping[str, Tensor]

    @classmethod
    def of_steps(
        cls, augmentation: Augmentation, bounds: Sequence[int], repeats: int, generator: np.random.Generator
    ) -> Variations:
        """Draws for all steps of an update.

        Args:
            augmentation: the kinds of changes.
            bounds: step s sees the images ``bounds[s]`` to ``bounds[s + 1]`` (excluded).
            repeats: how many consecutive steps see one and the same mini-batch, changed alike.
            generator: the stream ``augment`` of the client, round and pass.
        """
        batches = [stop - start for start, stop in pairwise(bounds)][::repeats]
        drawn = augmentation.draw(generator, sum(batches))
        if repeats > 1:
            ends = np.cumsum([0, *batches])
            rows = [np.tile(np.arange(ends[i], ends[i + 1]), repeats) for i in range(len(batches))]
            order = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *rows]))
            drawn = {name: values[order] for name, values in drawn.items()}
        return cls(augmentation, drawn)

    def part(self, start: int, stop: int) -> Variations:
        """Returns the variations of the images ``start`` to ``stop`` (excluded)."""
        return Variations(self.augmentation, {name: values[start:stop] for name, values in self.drawn.items()})

    def to(self, device: torch.device) -> Variations:
        """Returns the variations on a device."""
        drawn = {name: values.to(device) for name, values in self.drawn.items()}
        return Variations(self.augmentation.on(device), drawn)

    def applied(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The images and their targets, one a row of the random numbers, changed."""
        return self.augmentation.both(x, y, self.drawn)


def _mirrored(place: Tensor, size: int) -> Tensor:
    """Places outside of 0..size - 1, by less than size, mirrored at the first or last one."""
    return (size - 1) - ((size - 1) - place.abs()).abs()


def _within(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def _turned(row: Tensor, column: Tensor, turn: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Places rotated about the middle of the image, to the nearest pixel."""
    cosine, sine = turn[:, 0, None, None], turn[:, 1, None, None]
    down, right = row - (height - 1) / 2, column - (width - 1) / 2
    back_down = cosine * down - sine * right
    back_right = sine * down + cosine * right
    middle_down, middle_right = (height - 1) / 2, (width - 1) / 2
    return (back_down + middle_down + 0.5).floor().long(), (back_right + middle_right + 0.5).floor().long()
