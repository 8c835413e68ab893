"""What models and clients see of data: the shape of inputs, the samples of a split, and which samples they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

SPLITS = ("train", "validation", "test")

Places = Mapping[str, np.ndarray]
"""By split, which samples: ascending int64 indices."""


@dataclass(frozen=True)
class InputSpec:
    """What a model must know of the data.

    Attributes:
        kind: ``image`` (float32 inputs, in [0, 1] unless normalized; also vectors of any numbers) or ``tokens`` (int64
            indices).
        shape: shape of one input, e.g. ``(1, 28, 28)``, ``(80,)`` for tokens or ``(60,)`` for vectors.
        num_classes: number of labels.
        vocabulary: number of distinct tokens; 0 for images.
    """

    kind: Literal["image", "tokens"]
    shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0


@dataclass(frozen=True)
class Examples:
    """Samples of one client and split: ``x`` of shape (n, *input shape), ``y`` int64 of shape (n,).

    Those that a method makes to train on may have other targets: ``y`` of shape (n, ...), a row a sample.
    """

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])
