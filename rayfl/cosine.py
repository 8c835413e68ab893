"""The squared cosine between two models, with its gradient in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import tensors

_TINY = 1e-12


def squared_cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """cos^2 of the angle between two models, over all their parameters as one vector; a scalar.

    The gradient is SuPerFed's eqs. 5 and 6: with q = cos^2, dq/df = 2 (<f,l> / (|f|^2 |l|^2) l - q / |f|^2 f).
    Autograd through the three inner products would read the models three times as often.
    """
    left, right = tensors(first), tensors(second)
    result: Tensor = _SquaredCosine.apply(len(left), *left, *right)[0]
    return result


def products(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cos^2, the inner product of both, and the squared norms of the first and the second."""
    product, left_norm, right_norm = _inner(left, right), _inner(left, left), _inner(right, right)
    return squared_cosine_of(product, left_norm, right_norm), product, left_norm, right_norm


def squared_cosine_of(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """cos^2 from the inner product of two vectors and their squared norms; all are scalars."""
    return product * product / (left * right).clamp_min(_TINY)


def squared_cosine_factors(
    upstream: Tensor, cosine: Tensor, product: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the squared cosine q between f and l: those of l in f's and of f in l's, f in f's, l in l's.

    As a function of f it is 2 p / (|f|^2 |l|^2) l - 2 q / |f|^2 f. Where the denominator is held at its floor it is a
    constant, and only the numerator has a gradient.

    Args:
        upstream: the gradient of q; all are scalars.
        cosine: q.
        product: p, of f and l.
        left: |f|^2.
        right: |l|^2.
    """
    norms = left * right
    own = torch.where(norms > _TINY, -2 * upstream * cosine, torch.zeros_like(cosine))
    cross = 2 * upstream * product / norms.clamp_min(_TINY)
    return cross, own / left.clamp_min(_TINY), own / right.clamp_min(_TINY)


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in zip(left, right, strict=True)]).sum()


class _SquaredCosine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *models: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return products(models[:count], models[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        count, *models = inputs
        ctx.count = count
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*models, *output)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
        *models, cosine, product, left_norm, right_norm = ctx.saved_tensors
        left, right = models[: ctx.count], models[ctx.count :]
        cross, own_left, own_right = squared_cosine_factors(upstream, cosine, product, left_norm, right_norm)
        return (
            None,
            *(torch.addcmul(b * cross, a, own_left) for a, b in zip(left, right, strict=True)),
            *(torch.addcmul(a * cross, b, own_right) for a, b in zip(left, right, strict=True)),
        )
