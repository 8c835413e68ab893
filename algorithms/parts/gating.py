"""Text features of several prompts, mixed for each image and class by attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.generators import linear
from rayfl.params import Tree

LAYERS = ("query", "key", "value", "output")
"""Linear layers of a gate, each from g to g values."""


def first_gate(width: int, like: Tensor, generator: np.random.Generator) -> Tree:
    """A gate as drawn: ``weight`` (g, g) and ``bias`` (g,) of each of its layers, by ``layer.kind``.

    Args:
        width: g.
        like: has the type and device wanted.
        generator: draws it.
    """
    layers = {layer: linear(width, width, like, generator) for layer in LAYERS}
    return {f"{layer}.{kind}": leaf for layer, pair in layers.items() for kind, leaf in pair.items()}


def reduced(features: Tensor, width: int) -> Tensor:
    """Every r-th of D features, with the smallest r that leaves at most ``width``; shape (..., ceil(D / r))."""
    return features[..., :: math.ceil(features.shape[-1] / width)]


def reduced_width(features: int, width: int) -> int:
    """How many features :func:`reduced` leaves of ``features`` of them."""
    return math.ceil(features / math.ceil(features / width))


def gated_products(gate: Mapping[str, Tensor], images: Tensor, experts: Tensor, heads: int, sharpness: float) -> Tensor:
    """Inner products of images with the text features that a gate makes for each image and class, shape (b, C).

    With q, k and v linear in an image x and in the texts t_e of a class, and cut into heads h, these features are

        o_h = sum_e softmax_e(a <q_h, k_eh>) v_eh,    U (o_1, ..., o_H) + u

    The last layer is applied to the image, and not to the features of all classes: <x, U o + u> = <U^T x, o> + <x, u>.

    Args:
        gate: see :func:`first_gate`.
        images: x, of shape (b, g).
        experts: t, of shape (E, C, g).
        heads: H, a divisor of g.
        sharpness: a.
    """

    def cut(rows: Tensor) -> Tensor:
        return rows.reshape(*rows.shape[:-1], heads, -1)

    query, key, value = (
        cut(F.linear(rows, gate[f"{layer}.weight"], gate[f"{layer}.bias"]))
        for layer, rows in (("query", images), ("key", experts), ("value", experts))
    )
    attention = (sharpness * torch.einsum("bhd,echd->bche", query, key)).softmax(-1)
    said = torch.einsum("bhd,echd->bche", cut(images @ gate["output.weight"]), value)
    return (attention * said).sum((-2, -1)) + (images @ gate["output.bias"])[..., None]
