"""Sums and running means over the steps of a local update, as trained tensors.

A step of SGD with learning rate 1 on ``-<A, v>``, with v a constant, adds v to A; one on ``b/2 ||A - v||^2`` moves A
to ``(1 - b) A + b v``. So an objective can collect what it computes anyway, and stays a pure function. The tensors
need the group :data:`ACCUMULATOR`; clipped gradients would scale what is collected (:func:`check_unclipped`).
"""

from __future__ import annotations

from torch import Tensor

from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.optimization.optimizers import ParameterGroup

ACCUMULATOR = ParameterGroup(lr=1.0, momentum=0.0, weight_decay=0.0, optimizer="sgd")
"""How a tensor that collects is moved."""


def adding(total: Tensor, value: Tensor) -> Tensor:
    """Term of an objective whose step adds ``value``, a constant, to ``total``; a scalar."""
    return -(total * value.detach()).sum()


def averaging(running: Tensor, value: Tensor, share: float) -> Tensor:
    """Term of an objective whose step makes ``running`` ``(1 - share) running + share value``; a scalar."""
    return share / 2 * (running - value.detach()).square().sum()


def check_unclipped(method: str, option: str, context: RoundContext) -> None:
    """Refuses clipped gradients.

    Args:
        method: what to call the method.
        option: which of its options collects over the steps of a local update; empty: it always does.
        context: knows the training section.

    Raises:
        ConfigError: ``train.max_grad_norm`` is set.
    """
    if context.train.max_grad_norm is not None:
        raise ConfigError(
            f"{method}{option and f' with {option}'} adds up over its local steps what train.max_grad_norm would scale "
            f"down: set train.max_grad_norm=null, or choose another {'value of that option' if option else 'method'}"
        )
