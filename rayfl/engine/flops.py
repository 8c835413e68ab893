"""Counts floating-point operations of local steps, once for each shape of a step.

A step of a shape that was not met yet is done once more, apart and with its result dropped, under PyTorch's counter:
what the steps themselves compute is left as it is. The counter knows products of matrices, convolutions and attention,
with a multiplication and an addition as two operations; sums and activations count nothing there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from rayfl.engine import looped
from rayfl.engine.requests import TrainRequest
from rayfl.engine.tasks import Task

_log = logging.getLogger("rayfl")


class FlopCounter:
    """Counts the operations of local updates.

    Args:
        device: where they are computed.

    Attributes:
        total: operations of all updates so far; None as soon as one could not be counted.
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
            bounds = request.plan.bounds
            widths: dict[int, int] = {}
            for step in range(request.plan.steps):
                widths.setdefault(bounds[step + 1] - bounds[step], step)
            counts = Counter(bounds[step + 1] - bounds[step] for step in range(request.plan.steps))
            shape = replace(request, kept=None).group() if request.plan.steps else ()
            self.total += sum(
                counts[width] * self._of_step(request.part(step, step + 1), task, (shape, width))
                for width, step in widths.items()
            )
        except Exception as error:
            self.total = None
            _log.warning("floating-point operations are not counted (tracking.flops): %s", error)

    def _of_step(self, request: TrainRequest, task: Task, shape: Hashable) -> int:
        if shape not in self._known:
            with FlopCounterMode(display=False) as counter:
                looped.train(replace(request, kept=None), task, self._device)
            self._known[shape] = int(counter.get_total_flops())
        return self._known[shape]
