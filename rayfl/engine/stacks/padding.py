"""Whether an objective reads what fills up the mini-batches of stacked clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfl.engine.steps.looped import step_keys
from rayfl.engine.updates.feed import Feed
from rayfl.engine.updates.requests import Objective, TrainRequest, on_device, one_value
from rayfl.errors import MethodError
from rayfl.params import leaves, map_leaves
from rayfl.tasks.base import Batch, Task, begin_step


class PaddingCheck:
    """Tries objectives on padded mini-batches, once in a process each: it takes passes, and waits for the device."""

    def __init__(self) -> None:
        self._tried: list[Objective] = []

    def check(self, ranked: Sequence[TrainRequest], feed: Feed, task: Task, device: torch.device) -> None:
        """Takes one client's loss of a padded mini-batch twice, with another sample as padding the second time.

        A mean over all rows of a mini-batch, as ``cross_entropy(logits, batch.y)`` takes it, counts padding as samples:
        the client's gradient would be another one than when it is trained alone, and nothing would say so.

        Args:
            ranked: the clients' local updates, in the order of the stack.
            feed: their mini-batches.
            task: what is learned.
            device: where the stack computes.

        Raises:
            MethodError: the loss depends on the padding.
        """
        objective = ranked[0].objective
        if ranked[0].private is not None or objective in self._tried:  # private steps have one sample at a time
            return
        place = feed.first_padded()
        if place is None:
            return
        try:
            values = _values(ranked[place[1]], *place, feed, task, device)
        except Exception:  # what is wrong with the objective itself its first step tells
            return
        if values is None:
            return
        if not torch.allclose(*values, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise MethodError(
                "the loss of a mini-batch depends on its padding (average over samples with batch.mean(values), which "
                "leaves out the padding of stacked clients)"
            )
        self._tried = [*self._tried, objective][-_REMEMBERED:]


_REMEMBERED = 64
"""Objectives that are remembered: users may make a new one in every round."""


def _values(
    request: TrainRequest, step: int, rank: int, feed: Feed, task: Task, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Returns the two losses; None where all samples of the mini-batch are the one that it is padded with."""
    stacked_x, stacked_y, masks = feed.batch(step, rank + 1)
    assert masks is not None
    x, y, mask = stacked_x[rank], stacked_y[rank], masks[rank]
    count = int(mask.sum())
    other = next((row for row in range(count) if not torch.equal(x[row], x[count])), None)
    if other is None:
        return None
    rows = torch.arange(len(x), device=x.device)
    kind = next(leaf.dtype for _, leaf in leaves(request.trainable))
    frozen = None if request.frozen is None else map_leaves(lambda leaf: on_device(leaf, device), request.frozen)
    draw = None
    if request.draws is not None:
        draw = map_leaves(lambda leaf: torch.as_tensor(leaf[step], dtype=kind, device=device), request.draws)
    keys = step_keys([request], request.plan.steps, task, device)
    found = []
    for places in (rows, torch.where(mask > 0, rows, other)):
        if keys is not None:
            begin_step(task, keys[step, 0], True)
        # copies, as a forward pass in training mode writes running statistics
        model = map_leaves(lambda leaf: leaf.detach().to(device, copy=True), request.trainable)
        value = request.objective(model, Batch(x[places], y[places], mask), task, frozen, draw)
        found.append(one_value(value).detach().reshape(()))
    return found[0], found[1]
