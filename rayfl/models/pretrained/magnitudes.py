"""Magnitudes of a layer's outputs that are trained apart from their directions: DoRA.

With c the layer's own bias and the division by rows, so that every output has a norm and a magnitude m of its own,

    y = m * (W x + s B A x) / ||W + s B A|| + c

The norm follows A and B, but is a constant in the backward pass: gradients of A and B are those of low-rank adapters
times m / ||W + s B A||. Nobody needs W + s B A, so that all clients of a stack go on sharing W.

Source: Liu, Wang, Yin, Molchanov, Wang, Cheng, Chen: DoRA: Weight-Decomposed Low-Rank Adaptation, ICML 2024
(arXiv:2402.09353), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.errors import ModelError
from rayfl.params import TINY

MAGNITUDE = ".lora_magnitude_vector"
"""What the names of magnitudes end with, as in the files of ``peft``."""


def row_norms(matrix: Tensor) -> Tensor:
    """The norms of the rows of a matrix (o, i): float32, shape (o,)."""
    found: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    return found


def adapted_norms(matrix: Tensor, norms: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The norms of the rows of W + s B A of each client, which is never made.

    ||w + s b A||^2 = ||w||^2 + 2 s b (A w^T) + s^2 b (A A^T) b^T for a row w of W and its row b of B. The rows of all A
    go through W in one product.

    Args:
        matrix: W, shape (o, i), of any floating type.
        norms: those of its rows, float32 of shape (o,).
        a: A, float32 of shape (N, r, i); N may be one where all clients have the same.
        b: B, float32 of shape (N, o, r), in whose first dimension there may be one, too.
        scale: s.

    Returns:
        float32 of shape (N, o), through which no gradient flows; never zero.
    """
    a, b = a.detach(), b.detach()
    crossed = F.linear(a.flatten(0, 1).to(matrix.dtype), matrix).float().view(len(a), -1, len(matrix))
    squares = (b * (2 * scale * crossed.mT + scale**2 * (b @ (a @ a.mT)))).sum(-1) + norms.square()
    return squares.clamp_min(TINY**2).sqrt()


def rescaled(outputs: Tensor, bias: Tensor | None, magnitudes: Tensor, norms: Tensor) -> Tensor:
    """Outputs times m / ||W + s B A||, but for the bias.

    They are moved by their product with m / ||W + s B A|| - 1, which has digits where the factor itself, near 1 in a
    narrow type, has none. At 1 nothing changes.

    Args:
        outputs: W x + s B A x + c, shape (N, rows, o).
        bias: c, shape (o,); None for none.
        magnitudes: m, float32 of shape (N, o) or (o,).
        norms: as :func:`adapted_norms` returns them.
    """
    change = ((magnitudes - norms) / norms).to(outputs.dtype)[:, None]
    return torch.addcmul(outputs, outputs if bias is None else outputs - bias, change)


def refuse_magnitudes(names: Iterable[str], what: str) -> None:
    """Raises ModelError where a model has magnitudes.

    Args:
        names: of the model's tensors.
        what: is done with adapters, the subject of the message.
    """
    if any(name.endswith(MAGNITUDE) for name in names):
        raise ModelError(
            f"{what} supposes that adapters add s B A to their layers, which those with magnitudes do not: set "
            "model.adapter.use_dora=false"
        )
