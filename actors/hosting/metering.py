"""Measures time, operations and memory of a job on its host."""

from __future__ import annotations

import resource
import sys

import torch

from actors.hosting.job import JobResult
from actors.hosting.scoring import Scorer
from rayfl.diagnosis.busy_time import busy_seconds
from rayfl.engine.engine import Engine

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in a unit of ``ru_maxrss``."""


class Meter:
    """Measures from its creation on, without the time in which models are scored.

    Args:
        engine: engine that runs the job.
        scorer: scores the models of its clients.
    """

    def __init__(self, engine: Engine, scorer: Scorer) -> None:
        self._engine, self._scorer = engine, scorer
        self._began = busy_seconds(engine.device) - scorer.busy_s
        if engine.flops is not None and engine.flops.total is not None:
            engine.flops.total = 0

    def write(self, result: JobResult) -> None:
        """Writes time, operations and peak memory into a result."""
        result.busy_s = busy_seconds(self._engine.device) - self._scorer.busy_s - self._began
        result.flops = None if self._engine.flops is None else self._engine.flops.total
        result.peak_bytes = self._peak()

    def _peak(self) -> int:
        if self._engine.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._engine.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
