"""Data sets whose inputs are lists of numbers: FEMNIST's pixels, and the vectors of Synthetic."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayfl.data.sources.leaf.codec import Codec, Part, Split, labels, malformed
from rayfl.data.sources.natural import NaturalHeader

FEMNIST = NaturalHeader(kind="femnist", input="image", shape=(1, 28, 28), num_classes=62)

_PIXELS = 28 * 28
_UINT8_TOLERANCE = 1e-6
_MOST_CLASSES = 1000


class FemnistCodec(Codec):
    """x: 784 pixels in [0, 1]; y: one of 62 classes.

    Pixels are stored as uint8 k where every pixel of the data set is k/255 within 1e-6, else as float32.
    """

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        pixels = _numbers(x, _PIXELS, where, "a pixel is outside [0, 1]")
        # Written so that NaN counts as outside.
        outside = ~((pixels >= 0) & (pixels <= 1))
        if outside.any():
            sample, pixel = np.argwhere(outside)[0]
            value = pixels[sample, pixel]
            problem = "outside [0, 1]" if np.isfinite(value) else "not finite"
            raise malformed(where, f"pixel {pixel} of x[{sample}] is {value}, {problem}")
        levels = np.rint(pixels * 255)
        exact = np.abs(pixels - levels / 255).max(initial=0) <= _UINT8_TOLERANCE
        return Part(
            levels.astype(np.uint8) if exact else pixels.astype(np.float32), labels(y, FEMNIST.num_classes, where)
        )

    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        exact = all(part.x.dtype == np.uint8 for part in parts)
        return FEMNIST.model_copy(update={"storage": "uint8" if exact else "float32"})

    def stored(self, part: Part, header: NaturalHeader) -> Part:
        return Part(as_floats(part.x), part.y) if header.storage == "float32" else part


class SyntheticCodec(Codec):
    """x: a vector of as many numbers as the first one has; y: a class.

    There are as many classes as the largest label of the whole data set says.
    """

    def __init__(self) -> None:
        self._dimension = 0
        self._first = ""

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        if not self._dimension and x:
            if not isinstance(x[0], list) or not x[0]:
                raise malformed(where, "x[0] is not a list of numbers")
            self._dimension, self._first = len(x[0]), where
        for sample, row in enumerate(x):
            if isinstance(row, list) and len(row) != self._dimension:
                raise malformed(
                    where, f"x[{sample}] has {len(row)} numbers, but those of {self._first} have {self._dimension}"
                )
        numbers = _numbers(x, self._dimension, where, "a number is not finite as float32")
        with np.errstate(over="ignore"):
            vectors = numbers.astype(np.float32)
        if not np.isfinite(vectors).all():
            sample, place = np.argwhere(~np.isfinite(vectors))[0]
            raise malformed(where, f"number {place} of x[{sample}] is not finite as float32")
        return Part(vectors, labels(y, _MOST_CLASSES, where, floats=True))

    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        classes = 1 + max(int(part.y.max(initial=0)) for part in parts)
        return NaturalHeader(
            kind="synthetic", input="image", shape=(self._dimension,), num_classes=classes, storage="float32"
        )

    def stored(self, part: Part, header: NaturalHeader) -> Part:
        # A user that was empty before any vector was seen.
        return Part(part.x.reshape(len(part.y), self._dimension), part.y)


def as_floats(x: np.ndarray) -> np.ndarray:
    """Grey levels as the pixels k/255 in float32; floats as they are."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x


def _numbers(x: list[object], length: int, where: str, overflow: str) -> np.ndarray:
    """float64 of shape (n, length)."""
    for sample, row in enumerate(x):
        if not isinstance(row, list) or len(row) != length or not set(map(type, row)) <= {int, float}:
            raise malformed(where, f"x[{sample}] is not a list of {length} numbers")
    try:
        return np.array(x, dtype=np.float64).reshape(len(x), length)
    except OverflowError as error:
        raise malformed(where, overflow) from error
