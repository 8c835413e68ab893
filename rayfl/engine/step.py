"""One local step: where the loss is taken, its gradient there, the other terms, the optimizer's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rayfl.engine.loss_gradient import layers_of
from rayfl.engine.memory import MOVED, Memory
from rayfl.engine.optimizers import clipped
from rayfl.engine.points import At, Scope
from rayfl.engine.requests import TrainRequest
from rayfl.engine.tasks import Batch, Task
from rayfl.engine.term_step import StepOnTerms, draw_of_step
from rayfl.engine.terms import Loss, Penalty, Sum
from rayfl.params import leaves, map_leaves

Step = Callable[[Batch, int], None]
"""Takes a mini-batch and the number of the step, and moves the parameters."""


def step_of(request: TrainRequest, task: Task, memory: Memory) -> Step:
    """Returns how the steps of a local update are taken.

    Terms with known gradients are taken on flat buffers. All else is autograd's: functions, sums whose gradients are
    clipped or whose values are bounded, penalties for Adam, and the loss alone, whose gradient autograd leaves where
    the optimizer can read it. On flat buffers the gradient of a penalty that is zero is round-off, along which Adam
    would go a part of its learning rate.

    Args:
        request: the local update.
        task: what the objective is given.
        memory: the parameters, and what the optimizer keeps.
    """
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
    """Returns whether an objective is the loss of a model whose gradient is autograd's, and nothing else."""
    (factor, term), *others = objective.terms
    if others or factor != 1 or not isinstance(term, Loss) or not isinstance(term.at, At):
        return False
    return layers_of(scope.task, term.at.base(scope)) is None


class _ByAutograd:
    """Steps along the gradient of the whole objective."""

    def __init__(self, request: TrainRequest, task: Task, memory: Memory) -> None:
        self._request, self._task, self._memory, self._draws = request, task, memory, request.draws
        found = dict(leaves(memory.tree))
        self._variables = [found[path].requires_grad_() for path in memory.layout.moved]
        self._move = memory.mover(memory.layout.moved)
        if request.draws is not None:
            as_tensor = partial(torch.as_tensor, dtype=memory.layout.dtype, device=memory.flats[MOVED].device)
            self._draws = map_leaves(as_tensor, request.draws)

    def take(self, batch: Batch, number: int) -> None:
        """Moves the parameters along the gradient of one mini-batch."""
        request, draw = self._request, None if self._draws is None else draw_of_step(self._draws, number)
        value = request.objective(self._memory.tree, batch, self._task, request.frozen, draw)
        # zeros for what the objective does not read, as under vmap
        gradients = list(torch.autograd.grad(value, self._variables, materialize_grads=True))
        with torch.no_grad():
            self._memory.begin()
            self._move(gradients if request.max_grad_norm is None else clipped(gradients, request.max_grad_norm))
