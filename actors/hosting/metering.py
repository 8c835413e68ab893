"""Measures time, operations and memory of a job on its host."""

from __future__ import annotations

import resource
import sys
import time

import torch

from actors.hosting.job import JobResult
from rayfl.engine.engine import Engine

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in a unit of ``ru_maxrss``."""


class Meter:
    """Measures from its creation on.

    Args:
        engine: engine that runs the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began = self._now()
        if engine.flops is not None and engine.flops.total is not None:
            engine.flops.total = 0

    def write(self, result: JobResult) -> None:
        """Writes time, operations and peak memory into a result."""
        result.busy_s = self._now() - self._began
        result.flops = None if self._engine.flops is None else self._engine.flops.total
        result.peak_bytes = self._peak()

    def _now(self) -> float:
        """Returns the CPU seconds of this process; on a GPU the clock, once the GPU is idle."""
        if self._engine.device.type == "cpu":
            return time.process_time()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()

    def _peak(self) -> int:
        if self._engine.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._engine.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
