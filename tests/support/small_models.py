"""Small models of each kind, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, TwoCNN, TwoNN

SMALL_IMAGE = InputSpec("image", (3, 8, 9), 4)

SMALL_TEXT = InputSpec("tokens", (5,), 7, vocabulary=7)

SMALL: list[tuple[Architecture, InputSpec]] = [
    (TwoNN(hidden=(6, 5)), SMALL_IMAGE),
    (TwoNN(hidden=(6, 5, 4), bias=False, init="xavier_normal"), SMALL_IMAGE),
    (TwoCNN(), SMALL_IMAGE),
    (LeafCNN(), SMALL_IMAGE),
    (CharLSTM(hidden=6), SMALL_TEXT),
]


class Bidirectional(ClassificationModel):
    """Two stacked bidirectional LSTM layers with projections."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        steps: Tensor = self.lstm(x)[0]
        return steps[:, -1]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


def batch(spec: InputSpec, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if spec.kind == "tokens":
        return torch.randint(spec.vocabulary, (size, *spec.shape), generator=generator)
    return torch.rand(size, *spec.shape, generator=generator)


def views(tree: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat copy of the tree and the tree of views into it."""
    flat = torch.cat([tensor.flatten() for tensor in tree.values()])
    pieces = flat.split([tensor.numel() for tensor in tree.values()])
    return flat, {name: piece.view_as(tree[name]) for name, piece in zip(tree, pieces, strict=True)}
