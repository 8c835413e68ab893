"""Splits a training pass into several requests, for callbacks after epochs and changes of the learning rate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.trampoline import Ask
from rayfl.optimization.optimizers import OptimizerState
from rayfl.optimization.schedules import Schedule
from rayfl.params import Tree


async def in_pieces(
    request: TrainRequest,
    epoch: int,
    each_epoch: Callable[[Tree], Awaitable[bool | None]] | None,
    schedule: Schedule | None,
) -> Tree:
    """Runs a training pass in pieces, one per epoch and learning rate; the result is that of a single piece.

    Args:
        request: the whole pass.
        epoch: number of steps of an epoch.
        each_epoch: awaited after each epoch with the tree as trained so far, and true if the pass ends there; None: no
            callback.
        schedule: the course of the learning rate over the steps of the pass; None: constant.
    """
    steps = request.plan.steps
    factors = [1.0 if schedule is None else schedule.relative(step, steps, request.rule.lr) for step in range(steps)]
    if each_epoch is None:
        epoch = steps
    tree, kept = request.trainable, OptimizerState() if request.optimizer_state is None else request.optimizer_state
    for place, whole in enumerate(request.pieces(epoch)):
        for piece in whole.paced(factors[place * epoch :][: whole.plan.steps]):
            tree = await Ask(replace(piece, trainable=tree, optimizer_state=kept))
        if each_epoch is not None and await each_epoch(tree):
            break
    return tree
