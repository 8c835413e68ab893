"""Requests of a client's procedure to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.variations import Variations
from rayfl.engine.updates.batches import BatchPlan
from rayfl.engine.updates.flat import Layout
from rayfl.errors import MethodError
from rayfl.examples import Examples
from rayfl.optimization.optimizers import Groups, OptimizerState, Rule
from rayfl.params import Tree, leaves, map_leaves
from rayfl.tasks.base import Task

Objective = Callable[[Any, Any, Any, Any, Any], Tensor]
"""``objective(trainable, batch, task, frozen, draw) -> scalar``: pure, the same looped and under vmap."""

SERVER = -1
"""Stands for the server where clients are numbered."""


@dataclass(frozen=True)
class ExamplePrivacy:
    """How a local update limits what it says about single samples.

    Attributes:
        clip_norm: C.
        noise_multiplier: z.
        expected: B, the expected size of a mini-batch.
        seed: of the noise; no other local update may have it.
    """

    clip_norm: float
    noise_multiplier: float
    expected: float
    seed: int


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A local update: SGD on ``objective`` over the batches of ``plan``.

    Attributes:
        client: the client's id, for error messages.
        examples: the samples to train on, on the device.
        trainable: the tree to train; not modified.
        frozen: a tree the objective reads; None when it reads none.
        objective: see :data:`Objective`.
        draws: None, or a tree of arrays with one entry a step along dimension 0.
        plan: the mini-batches.
        rule: the optimizer's update rule.
        seed: of the random numbers of networks, such as dropout's.
        groups: parameter groups, by first key of ``trainable``.
        max_grad_norm: largest norm of a step's gradient; None sets no limit.
        optimizer_state: the optimizer's state before the update, which the engine replaces by the state after it; None
            for a fresh optimizer whose state is dropped.
        task: what the objective is given; None stands for the engine's own task.
        variations: augmentation of the samples of ``plan.order``, row by row; None without.
        begun: number of earlier steps with this seed.
        private: how gradients of single samples are limited; None: they are not.
    """

    client: int
    examples: Examples
    trainable: Tree
    frozen: Mapping[str, Any] | None
    objective: Objective
    draws: Mapping[str, Any] | None
    plan: BatchPlan
    rule: Rule
    seed: int
    groups: Groups = ()
    max_grad_norm: float | None = None
    optimizer_state: OptimizerState | None = None
    task: Task | None = None
    variations: Variations | None = None
    begun: int = 0
    private: ExamplePrivacy | None = None

    def part(self, first: int, last: int) -> TrainRequest:
        """Returns the request for steps ``first`` to ``last`` (exclusive)."""
        bounds = self.plan.bounds
        return replace(
            self,
            plan=self.plan.part(first, last),
            begun=self.begun + first,
            draws=None if self.draws is None else map_leaves(lambda d: d[first:last], self.draws),
            variations=None if self.variations is None else self.variations.part(bounds[first], bounds[last]),
        )

    def pieces(self, steps: int) -> list[TrainRequest]:
        """Splits the request into consecutive ones of ``steps`` steps each (fewer in the last)."""
        end = self.plan.steps
        return [self.part(first, min(first + steps, end)) for first in range(0, end, steps)]

    def paced(self, factors: Sequence[float]) -> Iterator[TrainRequest]:
        """Splits the request into consecutive ones, each with one factor of the learning rate.

        Args:
            factors: one for each step. Groups with their own rate keep it.
        """
        first = 0
        for factor, equal in groupby(factors):
            last = first + len(list(equal))
            yield replace(self.part(first, last), rule=replace(self.rule, lr=self.rule.lr * factor))
            first = last

    @property
    def rules(self) -> list[Rule]:
        """Returns the update rules of all parameters."""
        return [self.rule, *(group.applied(self.rule) for _, group in self.groups)]

    def _steps_before(self) -> tuple[tuple[str, int], ...] | None:
        """Returns the optimizer's earlier steps, if the update depends on them; None for a fresh optimizer."""
        if self.optimizer_state is None:
            return None
        return tuple(sorted(self.optimizer_state.steps.items())) if any(rule.counts for rule in self.rules) else ()

    def group(self) -> tuple[Any, ...]:
        """Returns a key: requests with equal keys can be stacked."""
        return (
            TrainRequest,
            self.objective,
            Layout.of(self.trainable),
            _structure(self.frozen, Tensor),
            _structure(self.draws, (Tensor, np.ndarray), skip=1),
            self.examples.x.shape[1:],
            self.examples.x.dtype,
            self.examples.y.shape[1:],
            self.examples.y.dtype,
            self.rule,
            self.groups,
            self._steps_before(),
            self.max_grad_norm,
            self.task,
            None if self.variations is None else self.variations.augmentation,
            None if self.private is None else (self.private.clip_norm, self.private.noise_multiplier),
        )


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """The full-batch gradient of ``objective`` at ``point`` over the client's training samples.

    Attributes:
        client: the client's id, for error messages.
        examples: the client's training samples, on the device.
        point: the tree at which the gradient is taken; not modified.
        objective: called without draws.
        batch_size: samples at a time.
        seed: of the random numbers of networks, such as dropout's.
        frozen: a tree the objective reads; None when it reads none.
        task: what the objective is given; None stands for the engine's own task.
    """

    client: int
    examples: Examples
    point: Tree
    objective: Objective
    batch_size: int
    seed: int
    frozen: Mapping[str, Any] | None = None
    task: Task | None = None


@dataclass(frozen=True, eq=False)
class OutputRequest:
    """The outputs of a model in evaluation mode for many samples, without gradients.

    Attributes:
        client: the client's id, for error messages.
        x: inputs, on the device, shape (n, *input shape).
        function: ``(x, task) -> Tensor`` with one row a sample; called on consecutive batches.
        batch_size: samples at a time.
        task: what the function is given; None stands for the engine's own task.
    """

    client: int
    x: Tensor
    function: Callable[[Tensor, Any], Tensor]
    batch_size: int
    task: Task | None = None


Request = TrainRequest | GradientRequest | OutputRequest


def one_value(value: Any) -> Tensor:
    """Returns the value of an objective, of one client also under ``vmap``.

    Raises:
        MethodError: when it is not a tensor with a single element.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise MethodError(
        f"an objective returned {what} where it must return one number, as a tensor: average the values of samples "
        "with batch.mean(values)"
    )


def on_device(leaf: Any, device: torch.device) -> Any:
    """Returns a leaf of ``frozen`` on the device: NumPy's arrays as tensors, its scalars as plain numbers."""
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    if isinstance(leaf, np.ndarray):
        return torch.tensor(leaf, device=device)
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def arrays_of(draws: Tree, steps: int) -> Tree:
    """Returns what a method has drawn as arrays.

    Args:
        draws: the tree that ``draw`` returned.
        steps: of the pass.

    Raises:
        MethodError: when an array has another number of entries than there are steps.
    """
    found = map_leaves(lambda leaf: np.asarray(leaf.cpu() if isinstance(leaf, Tensor) else leaf), draws)
    for path, array in leaves(found):
        if array.shape[:1] != (steps,):
            raise MethodError(
                f"draw returned {path!r} with shape {array.shape} for a pass of {steps} steps: it needs one entry for "
                f"each along dimension 0, shape ({steps}, ...)"
            )
    return found


def _structure(tree: Mapping[str, Any] | None, stacked: Any, skip: int = 0) -> tuple[Any, ...] | None:
    """Returns shapes and types of leaves of the types that are stacked; what else there is, one stack has in common."""
    if tree is None:
        return None
    return tuple((p, v.shape[skip:], v.dtype) if isinstance(v, stacked) else (p, _key(v)) for p, v in leaves(tree))


def _key(value: Any) -> Any:
    """Returns the value, or the identity of one that cannot be hashed (a list)."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
