"""The handwritten digits that come with scikit-learn: small, and always there."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples, Source
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_BRIGHTEST = 16


class DigitsSource(Source):
    """Configuration of the 1797 digits of 8 x 8 pixels (UCI, Optical Recognition of Handwritten Digits, test part)."""

    name: Literal["digits"] = Field(default="digits", description="scikit-learn's digits; needs no file.")

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All samples: x float32 of shape (1797, 1, 8, 8) in [0, 1]."""
        images, labels = _read()
        x = (images / _BRIGHTEST).astype(np.float32)[:, np.newaxis]
        return Samples(x, labels.astype(np.int64), InputSpec("image", (1, 8, 8), 10))


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels, which nobody changes: scikit-learn parses a text file on each call."""
    # Slow to import, and only this source needs it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target
