"""Models that the table of methods and tasks needs beside those of the zoo."""

from __future__ import annotations

import math

import torch
from torch import nn

from rayfl.examples import InputSpec


class _OfTokens(nn.BatchNorm1d):
    """Batch normalization of vectors along texts, shape (b, length, channels)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def normalized(spec: InputSpec) -> nn.Module:
    """A small network with batch normalization, for FedBN and FedAP."""
    if spec.kind == "tokens":
        return nn.Sequential(nn.Embedding(spec.vocabulary, 6), _OfTokens(6), nn.Linear(6, spec.num_classes))
    if spec.kind == "graph":
        return nn.Sequential(nn.Linear(spec.shape[1], 6), _OfTokens(6), nn.Linear(6, spec.num_classes))
    if spec.target == "mask":
        channels = spec.shape[0]
        return nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, spec.num_classes, 1))
    inputs = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(spec.shape), 6))
    return nn.Sequential(inputs, nn.BatchNorm1d(6), nn.Linear(6, spec.num_classes))
