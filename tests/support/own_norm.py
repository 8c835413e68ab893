"""A user's model with batch normalization, named in configurations as tests.support.own_norm:normalized."""

from __future__ import annotations

import math

from torch import nn

from rayfl.examples import InputSpec


def normalized(spec: InputSpec) -> nn.Module:
    inputs = math.prod(spec.shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, spec.num_classes)
    )
