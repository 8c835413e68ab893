"""Cross-entropies of an output layer with a large vocabulary, of which few rows of logits are in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfl.metrics.language import IGNORED

LOGITS = 1 << 26
"""How many logits are computed at a time: 256 MiB in float32."""


def rows_at_a_time(vocabulary: int) -> int:
    """Returns of how many positions the logits are computed at a time."""
    return max(LOGITS // vocabulary, 1)


def token_losses(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropies of softmax(W h), computed for the positions alone that have a target.

    Which these are is known to the host then; while a CUDA graph is recorded it may not be asked, and all are computed.

    Args:
        features: h, shape (n, f).
        weight: W, shape (V, f), of the same type; gets no gradient.
        targets: int64 of shape (n,), :data:`rayfl.metrics.language.IGNORED` where there is none.

    Returns:
        float32 of shape (n,); 0 where there is no target. Differentiable once.
    """
    wanted = features.requires_grad and torch.is_grad_enabled()
    if is_recorded(features):
        whole: Tensor = _Losses.apply(features, weight, targets, wanted)
        return whole
    rows = (targets != IGNORED).nonzero()[:, 0]
    found: Tensor = _Losses.apply(features.index_select(0, rows), weight, targets.index_select(0, rows), wanted)
    return found.new_zeros(len(targets)).index_copy(0, rows, found)


def is_recorded(tensor: Tensor) -> bool:
    """Returns whether what is done with a tensor is recorded as a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Losses(torch.autograd.Function):
    """Computes gradients with respect to the features together with the losses, so that no logits are kept.

    A loss is log sum exp(W h) - (W h)_y, its gradient W^T (softmax(W h) - e_y). Logits are rounded to the type of the
    weight, as the layer itself rounds them, and all else is float32.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        losses = features.new_empty(len(features), dtype=torch.float32)
        gradients = torch.empty_like(features) if wanted else None
        size = rows_at_a_time(len(weight))
        for first in range(0, len(features), size):
            here = slice(first, first + size)
            logits = (features[here] @ weight.T).float()
            asked, labels = targets[here, None] != IGNORED, targets[here, None].clamp(min=0)
            total = logits.logsumexp(1, keepdim=True)
            losses[here] = ((total - logits.gather(1, labels)) * asked)[:, 0]
            if gradients is not None:
                difference = logits.sub_(total).exp_()
                difference.scatter_add_(1, labels, difference.new_full(labels.shape, -1))
                gradients[here] = (difference.to(weight.dtype) @ weight) * asked
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return (gradients * above[:, None]).to(gradients.dtype), None, None, None
