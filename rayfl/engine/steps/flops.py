"""Counts floating-point operations of local steps, once for each shape of a step.

The first step of each shape is repeated under PyTorch's counter, on a copy, and its result dropped: the actual steps
are unchanged. The counter knows matrix products, convolutions and attention; a multiply-add counts as two operations,
elementwise operations count nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import torch

from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.tasks.base import Task
from rayfl.tasks.texts import trimmer_of

_log = logging.getLogger("rayfl")


class FlopCounter:
    """Counts the operations of local updates.

    Args:
        device: where to run the counted steps.

    Attributes:
        total: operations of all updates so far; None once one could not be counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, int] = {}
        self.total: int | None = 0

    def add(self, request: TrainRequest, task: Task) -> None:
        """Adds the operations of one update to :attr:`total`.

        Args:
            request: the update.
            task: what its objective is given.
        """
        if self.total is None:
            return
        try:
            sizes = _sizes_of_steps(request, task)
            counts, shape = Counter(sizes), replace(request, optimizer_state=None).group() if sizes else ()
            first = {size: sizes.index(size) for size in counts}
            self.total += sum(
                counts[size] * self._of_step(request.part(step, step + 1), task, (shape, size))
                for size, step in first.items()
            )
        except Exception as error:
            self.total = None
            _log.warning("floating-point operations are not counted (tracking.flops): %s", error)

    def _of_step(self, request: TrainRequest, task: Task, shape: Hashable) -> int:
        if shape not in self._known:
            # Here: it brings Triton, at a third of a second whenever a process starts.
            from torch.utils.flop_counter import FlopCounterMode

            with FlopCounterMode(display=False) as counter:
                looped.train(replace(request, optimizer_state=None), task, self._device)
            self._known[shape] = int(counter.get_total_flops())
        return self._known[shape]


def _sizes_of_steps(request: TrainRequest, task: Task) -> list[tuple[int, int]]:
    """Returns the samples and text columns of each step; 0 columns if none are trimmed."""
    plan, trimmer = request.plan, trimmer_of(task)
    bounds = [(plan.bounds[step], plan.bounds[step + 1]) for step in range(plan.steps)]
    if trimmer is None:
        return [(end - begin, 0) for begin, end in bounds]
    x, y = request.examples.x, request.examples.y
    lengths = trimmer.lengths(x, y)[plan.order]
    return [(end - begin, trimmer.width(lengths[begin:end], x.shape[-1])) for begin, end in bounds]
