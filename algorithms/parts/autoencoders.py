"""Variational autoencoders that clients train beside a model: what they make of inputs, and how much a code tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from algorithms.parts.layers import draw_linear, linear
from rayfl.params import Tree


def draw_autoencoder(inputs: int, hidden: int, code: int, like: Tensor, generator: np.random.Generator) -> Tree:
    """Two linear layers with a ReLU between them that encode an input, and two that decode it.

    Args:
        inputs: numbers of an input, d.
        hidden: width between the two layers.
        code: numbers of a code, m.
        like: a tensor of the type and device wanted.
        generator: where the numbers come from.
    """
    widths = {
        "reads": (inputs, hidden),
        "encodes": (hidden, 2 * code),
        "unfolds": (code, hidden),
        "writes": (hidden, inputs),
    }
    return {name: draw_linear(*sizes, like, generator) for name, sizes in widths.items()}


def encoded(network: Mapping[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Means and logarithms of the variances of codes, shape (b, m) each, of flat inputs (b, d)."""
    mean, log_variance = linear(network["encodes"], linear(network["reads"], x).relu()).chunk(2, dim=-1)
    return mean, log_variance


def decoded(network: Mapping[str, Any], code: Tensor) -> Tensor:
    """Flat inputs (b, d) for codes (b, m)."""
    return linear(network["writes"], linear(network["unfolds"], code).relu())


def told(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL( N(mean, variance) || N(0, I) ) of each code in nats, shape (b,); arguments as of :func:`encoded`."""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
