"""The handwritten digits that come with scikit-learn: small, and always there."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rayfl.data.federated import InputSpec

_BRIGHTEST = 16


class DigitsSource(BaseModel):
    """Configuration of the 1797 digits of 8 x 8 pixels (UCI, Optical Recognition of Handwritten Digits, test part)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["digits"] = Field(default="digits", description="scikit-learn's digits; needs no file.")

    def arrays(self) -> tuple[np.ndarray, np.ndarray, InputSpec]:
        """All samples: x float32 of shape (1797, 1, 8, 8) in [0, 1], y int64 of shape (1797,), and their spec."""
        # Slow to import, and only this source needs it.
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = (digits.images / _BRIGHTEST).astype(np.float32)[:, np.newaxis]
        return x, digits.target.astype(np.int64), InputSpec("image", (1, 8, 8), 10)
