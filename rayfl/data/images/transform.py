"""What is done to images before a model sees them: the same for all parts, and without randomness.

Random changes of training images are :mod:`rayfl.data.images.augment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.images.moments import Moments
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec


class Normalization(BaseModel):
    """Numbers subtracted from, and divided into, the values of each channel, given in units of [0, 1]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[float, ...] = Field(min_length=1, description="What is subtracted, one number per channel or for all.")
    std: tuple[float, ...] = Field(min_length=1, description="What is divided by, one number per channel or for all.")

    @model_validator(mode="after")
    def _usable(self) -> Normalization:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; give equally many")
        if not (np.isfinite(self.mean).all() and np.isfinite(self.std).all() and min(self.std) > 0):
            raise ValueError("the numbers must be finite, and those of std above 0")
        return self


class TransformConfig(BaseModel):
    """Resizing and normalization of images, applied to all parts of all clients alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resize: int | None = Field(
        default=None,
        ge=1,
        description="Height and width in pixels that images are brought to (bilinear, as Pillow does it, rounded to "
        "whole pixel values); null: as they are.",
    )
    normalize: Literal["none", "dataset"] | Normalization = Field(
        default="none",
        description="none: pixels in [0, 1]; dataset: mean 0 and standard deviation 1 in each channel over the "
        "source's (train) samples, before resizing; or {mean: [...], std: [...]}.",
    )

    def build(self, stored: InputSpec, moments: Callable[[], Moments]) -> Preprocessing:
        """The transform for samples that are stored as ``stored`` says.

        Args:
            stored: the source's inputs.
            moments: gives the moments of the source's samples; called only where they are needed.

        Raises:
            ConfigError: the transform does not fit such inputs.
        """
        if self == TransformConfig():
            return Preprocessing(stored)
        if stored.kind != "image":
            raise ConfigError(
                f"transform: the inputs are {stored.kind.removesuffix('s')}s, which cannot be resized or normalized"
            )
        if self.resize is not None and len(stored.shape) != 3:
            raise ConfigError(f"transform.resize: inputs of the shape {stored.shape} are not (channels, height, width)")
        if self.resize is not None and stored.target == "mask":
            raise ConfigError(
                "transform.resize: images would no longer fit their masks, which are scored as they are: resize both "
                "where the data are made, or leave the option out"
            )
        if self.normalize == "none":
            return Preprocessing(stored, self.resize)
        if isinstance(self.normalize, Normalization):
            mean, std = np.array(self.normalize.mean), np.array(self.normalize.std)
        else:
            mean, std = moments().mean, moments().std
            std = np.where(std > 0, std, 1.0)  # a constant channel becomes 0
        channels = stored.shape[0]
        if len(mean) not in (1, channels):
            raise ConfigError(
                f"transform.normalize: {len(mean)} numbers for images of {channels} channels; give {channels}"
            )
        return Preprocessing(stored, self.resize, mean, std)


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """From stored values to what a model sees.

    Attributes:
        stored: kind and shape of what is stored.
        size: height and width in pixels; None leaves them.
        mean: subtracted, of shape (channels,) or (1,); None leaves the values.
        std: divided by, of the same shape.
    """

    stored: InputSpec
    size: int | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    @property
    def spec(self) -> InputSpec:
        """Kind and shape of what the model sees."""
        if self.size is None:
            return self.stored
        shape = (self.stored.shape[0], self.size, self.size)
        return replace(self.stored, shape=shape)

    @property
    def black(self) -> np.ndarray:
        """Returns what the model sees of a pixel of value 0, by channel: float32 of shape (channels,)."""
        return self.pixel(0)

    def pixel(self, value: float) -> np.ndarray:
        """Returns what the model sees of a pixel that has a value in all channels: float32 of shape (channels,).

        Args:
            value: as in images that are stored as float32: 0 is black, 1 white.
        """
        plain = np.full((1, *self.stored.shape), value, dtype=np.float32)
        return Preprocessing(self.stored, None, self.mean, self.std)(plain).reshape(len(plain[0]), -1)[:, 0]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Inputs for the model, in fresh memory.

        Args:
            x: uint8 standing for x / 255, or float32, of shape (n, *stored shape); tokens of any integer type.

        Returns:
            float32 (tokens: int64) of shape (n, *spec.shape).
        """
        if self.stored.kind == "tokens":
            return x.astype(np.int64)
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = _resized(x, self.size)
        values = x.astype(np.float32)
        if x.dtype == np.uint8:
            values /= np.float32(255)
        if self.mean is not None and self.std is not None:
            axes = (-1, *[1] * (len(self.stored.shape) - 1))
            values -= self.mean.astype(np.float32).reshape(axes)
            values /= self.std.astype(np.float32).reshape(axes)
        return values


def _resized(x: np.ndarray, size: int) -> np.ndarray:
    """Every channel by itself; Pillow's modes L and F are uint8 and float32."""
    planes = np.ascontiguousarray(x).reshape(-1, *x.shape[-2:])
    result = np.empty((len(planes), size, size), dtype=x.dtype)
    for place, plane in enumerate(planes):
        result[place] = Image.fromarray(plane).resize((size, size), Image.Resampling.BILINEAR)
    return result.reshape(*x.shape[:-2], size, size)
