"""One local step: evaluates the loss's gradient, adds the other terms, applies the optimizer's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rayfl.engine.gradients.example_gradients import ExampleGradients
from rayfl.engine.gradients.loss_gradient import layers_of
from rayfl.engine.steps.term_step import StepOnTerms, draw_of_step
from rayfl.engine.steps.training_buffers import MOVED, TrainingBuffers
from rayfl.engine.updates.requests import TrainRequest, one_value
from rayfl.objectives.points import At, Scope
from rayfl.objectives.terms import Loss, Penalty, Sum
from rayfl.optimization.optimizers import clipped
from rayfl.params import leaves, map_leaves
from rayfl.tasks.base import Batch, Task

Step = Callable[[Batch, int], None]
"""Takes a mini-batch and the number of the step, and moves the parameters; autograd is off where it is called."""


def step_of(request: TrainRequest, task: Task, memory: TrainingBuffers) -> Step:
    """Returns the implementation of an update's steps: closed-form terms on flat buffers, autograd, or private steps.

    Terms with known gradients are computed on flat buffers. Autograd handles all else: functions, clipped gradients,
    bounded values, penalties under Adam, and a loss alone, whose gradient the optimizer can read where autograd puts
    it. Penalties under Adam: on flat buffers the gradient of a zero penalty is round-off, which Adam would scale up to
    a part of its learning rate.

    Args:
        request: the local update.
        task: what the objective is given.
        memory: parameters and optimizer state.
    """
    if request.private is not None:
        return _OfExamples(request, task, memory).take
    objective = request.objective
    rules = memory.rules.values()
    if isinstance(objective, Sum) and objective.readable:
        adam = any(rule.optimizer != "sgd" for rule in rules)
        rounded = adam and any(isinstance(term, Penalty) for _, term in objective.terms)
        if request.max_grad_norm is None and not rounded and not any(rule.bounds for rule in rules):
            if not _is_loss_alone(objective, Scope(memory.tree, task, request.frozen)):
                return StepOnTerms(objective, request, task, memory).take
    return _ByAutograd(request, task, memory).take


def _is_loss_alone(objective: Sum, scope: Scope) -> bool:
    """Returns whether an objective is only the loss of a model without a hand-written gradient."""
    (factor, term), *others = objective.terms
    if others or factor != 1 or not isinstance(term, Loss) or not isinstance(term.at, At):
        return False
    return layers_of(scope.task, term.at.base(scope)) is None


class _ByAutograd:
    """Steps on the whole objective, by autograd."""

    def __init__(self, request: TrainRequest, task: Task, memory: TrainingBuffers) -> None:
        self._request, self._task, self._memory, self._draws = request, task, memory, request.draws
        found = dict(leaves(memory.tree))
        self._variables = [found[path].requires_grad_() for path in memory.layout.moved]
        self._move = memory.mover(memory.layout.moved)
        if request.draws is not None:
            as_tensor = partial(torch.as_tensor, dtype=memory.layout.dtype, device=memory.flats[MOVED].device)
            self._draws = map_leaves(as_tensor, request.draws)

    def take(self, batch: Batch, number: int) -> None:
        """Updates the parameters by a step on one mini-batch."""
        request, draw = self._request, None if self._draws is None else draw_of_step(self._draws, number)
        with torch.enable_grad():
            value = request.objective(self._memory.tree, batch, self._task, request.frozen, draw)
        # zero gradients for unused parameters, as under vmap
        gradients = list(torch.autograd.grad(one_value(value), self._variables, materialize_grads=True))
        self._memory.begin()
        self._move(gradients if request.max_grad_norm is None else clipped(gradients, request.max_grad_norm))


class _OfExamples:
    """Private steps: the client is a stack of its own (:mod:`rayfl.engine.gradients.example_gradients`)."""

    def __init__(self, request: TrainRequest, task: Task, memory: TrainingBuffers) -> None:
        device = memory.flats[MOVED].device
        dims = None if request.frozen is None else map_leaves(lambda _: None, request.frozen)
        self._gradients = ExampleGradients([request], task, dims, device)
        self._frozen, self._max_norm, self._memory = request.frozen, request.max_grad_norm, memory
        self._moved, self._draws = memory.layout.moved, None
        if request.draws is not None:
            as_tensor = partial(torch.as_tensor, dtype=memory.layout.dtype, device=device)
            self._draws = map_leaves(as_tensor, request.draws)
        self._stacked = {path: leaf[None] for path, leaf in leaves(memory.tree)}
        self._move = memory.mover(self._moved)

    def take(self, batch: Batch, number: int) -> None:
        """Updates the parameters by a step on one mini-batch."""
        draw = None if self._draws is None else map_leaves(lambda leaf: leaf[number][None], self._draws)
        examples = batch.x[None], batch.y[None], None
        made = self._gradients(number, self._stacked, self._moved, *examples, self._frozen, draw)
        gradients = [gradient[0] for gradient in made]
        self._memory.begin()
        self._move(gradients if self._max_norm is None else clipped(gradients, self._max_norm))
