"""A network that makes a context of CLIP's texts from the names of classes: cross-attention and a feed-forward part."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.generators import linear
from rayfl.params import Tree

SPREAD = 0.02
"""Standard deviation of the queries at first, that of a context."""


def first_generator(context: Tensor, features: int, expansion: int, generator: np.random.Generator) -> Tree:
    """The network as drawn: queries like a context, layers as PyTorch draws them; biases of the attention are zero.

    Args:
        context: of the shape (M, d) that it makes, and of the type and device wanted.
        features: D, of a name.
        expansion: e: the feed-forward part is e d wide.
        generator: draws it.

    Returns:
        Leaves by ``layer.kind``; ``query``, ``key``, ``value`` and ``output`` are the attention's, ``wide`` and
        ``narrow`` those of the feed-forward part, and ``norm_...`` scales and shifts.
    """
    length, width = context.shape
    found = {"queries": torch.from_numpy(SPREAD * generator.standard_normal((length, width))).to(context)}
    for layer, inputs in (("query", width), ("key", features), ("value", features)):
        bound = math.sqrt(6 / (inputs + width))
        found[f"{layer}.weight"] = torch.from_numpy(generator.uniform(-bound, bound, (width, inputs))).to(context)
    found["output.weight"] = linear(width, width, context, generator)["weight"]
    found |= {f"{layer}.bias": context.new_zeros(width) for layer in ("query", "key", "value", "output")}
    for layer, inputs, outputs in (("wide", width, 2 * expansion * width), ("narrow", expansion * width, width)):
        found |= {f"{layer}.{kind}": leaf for kind, leaf in linear(inputs, outputs, context, generator).items()}
    for norm, size in (("norm_queries", width), ("norm_names", features), ("norm_made", width)):
        found |= {f"{norm}.weight": context.new_ones(size), f"{norm}.bias": context.new_zeros(size)}
    return found


def generated(generator: Mapping[str, Tensor], names: Tensor, own: Tensor, heads: int) -> Tensor:
    """The context that a generator makes of the names of some classes, shape (M, d); their order does not count.

    With Q the queries, T the names and LN layer normalization, it is h + g(LN(h)), where h is the attention of LN(Q) to
    LN(T), and g(x) = B (u * GELU(v)) + b with (u, v) = A x + a.

    Args:
        generator: see :func:`first_generator`.
        names: features of the names of all classes, shape (C, D).
        own: nonzero for the classes whose names are read, one at least, shape (C,).
        heads: of the attention, a divisor of d.
    """

    def through(layer: str, rows: Tensor) -> Tensor:
        return F.linear(rows, generator[f"{layer}.weight"], generator[f"{layer}.bias"])

    def normed(norm: str, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[-1:], generator[f"{norm}.weight"], generator[f"{norm}.bias"])

    def cut(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), heads, -1)

    known = normed("norm_names", names)
    query, key, value = (
        cut(through(layer, rows))
        for layer, rows in (("query", normed("norm_queries", generator["queries"])), ("key", known), ("value", known))
    )
    scores = torch.einsum("mhk,chk->mhc", query, key) / math.sqrt(key.shape[-1])
    attention = scores.masked_fill(own == 0, -torch.inf).softmax(-1)
    made = through("output", torch.einsum("mhc,chk->mhk", attention, value).flatten(1))
    content, gate = through("wide", normed("norm_made", made)).chunk(2, -1)
    return made + through("narrow", content * F.gelu(gate))
