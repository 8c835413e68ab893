"""Mean and standard deviation of each channel of many inputs, from sums that can be added and stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import BaseModel, ConfigDict

CHUNK_VALUES = 1 << 22
"""Values of inputs that are summed at a time, as far as a single input has no more."""


class Moments(BaseModel):
    """Sums over some inputs; a channel is an index of the first axis of an input.

    Attributes:
        count: values per channel.
        total: sum of the values of each channel, in units of [0, 1] for pixels.
        squares: sum of their squares.
    """

    model_config = ConfigDict(frozen=True)

    count: int
    total: tuple[float, ...]
    squares: tuple[float, ...]

    @property
    def mean(self) -> np.ndarray:
        """float64 of shape (channels,)."""
        return np.array(self.total) / max(self.count, 1)

    @property
    def std(self) -> np.ndarray:
        """The population's, float64 of shape (channels,)."""
        variance = np.array(self.squares) / max(self.count, 1) - self.mean**2
        std: np.ndarray = np.sqrt(np.maximum(variance, 0))
        return std

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of inputs together."""
        return Moments(
            count=self.count + other.count,
            total=tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            squares=tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )


def moments_of(x: np.ndarray) -> Moments:
    """The moments of inputs of shape (n, channels, ...): uint8 standing for x / 255, or float32; nan counts as 0.

    Sums of uint8 are exact up to one rounding, however the inputs are divided.
    """
    pixels = x.dtype == np.uint8
    total = np.zeros(x.shape[1], dtype=np.int64 if pixels else np.float64)
    squares = np.zeros_like(total)
    for chunk in _chunks(x):
        values = chunk.reshape(len(chunk), x.shape[1], -1).astype(total.dtype)
        values = values if pixels else np.nan_to_num(values, copy=False)
        total += values.sum(axis=(0, 2))
        squares += np.square(values).sum(axis=(0, 2))
    scale = 255.0 if pixels else 1.0
    return Moments(
        count=x.size // x.shape[1],
        total=tuple((total / scale).tolist()),
        squares=tuple((squares / scale**2).tolist()),
    )


def _chunks(x: np.ndarray) -> Iterable[np.ndarray]:
    rows = max(1, CHUNK_VALUES // max(1, int(np.prod(x.shape[1:]))))
    return (x[start : start + rows] for start in range(0, len(x), rows))
