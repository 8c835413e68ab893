"""What a client's procedure asks of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.data.federated import Examples
from rayfl.engine.batches import BatchPlan
from rayfl.params import Layout, Tree, leaves

Objective = Callable[[Any, Any, Any, Any, Any], Tensor]
"""``objective(trainable, batch, task, frozen, draw) -> scalar``: pure, the same looped and under vmap."""


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A local update: SGD on ``objective`` over the batches of ``plan``.

    Attributes:
        client: the client's id, for error messages.
        examples: the client's training samples, on the device.
        trainable: the tree to train; not modified.
        frozen: a tree the objective reads; None when it reads none.
        objective: see :data:`Objective`.
        draws: None, or a tree whose leaves have one entry a step along dimension 0.
        plan: the mini-batches.
        lr: learning rate of the round.
        momentum: momentum; buffers start empty.
        weight_decay: L2 coefficient added to the gradient.
        seed: seed of PyTorch's generator for networks with dropout.
    """

    client: int
    examples: Examples
    trainable: Tree
    frozen: Mapping[str, Any] | None
    objective: Objective
    draws: Mapping[str, Any] | None
    plan: BatchPlan
    lr: float
    momentum: float
    weight_decay: float
    seed: int

    def group(self) -> tuple[Any, ...]:
        """Requests with equal groups can be stacked and stepped together."""
        return (
            TrainRequest,
            self.objective,
            Layout.of(self.trainable),
            _structure(self.frozen),
            _structure(self.draws, skip=1),
            self.examples.x.shape[1:],
            self.examples.x.dtype,
            self.lr,
            self.momentum,
            self.weight_decay,
        )


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """The full-batch gradient of ``objective`` at ``point`` over the client's training samples.

    Attributes:
        client: the client's id, for error messages.
        examples: the client's training samples, on the device.
        point: the tree at which the gradient is taken; not modified.
        objective: called without frozen tensors and draws.
        batch_size: samples at a time.
        seed: seed of PyTorch's generator for networks with dropout.
    """

    client: int
    examples: Examples
    point: Tree
    objective: Objective
    batch_size: int
    seed: int


Request = TrainRequest | GradientRequest


def _structure(tree: Mapping[str, Any] | None, skip: int = 0) -> tuple[Any, ...] | None:
    if tree is None:
        return None
    return tuple((p, v.shape[skip:], v.dtype) if isinstance(v, torch.Tensor) else (p, v) for p, v in leaves(tree))
