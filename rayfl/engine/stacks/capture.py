"""Captures a stack's steps as CUDA graphs and replays them, so that the host launches one graph per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.errors import text_of

_log = logging.getLogger(__name__)
_WORTH = 6
"""Least number of steps of one shape for which capture pays off: warm-up and capture cost more than two eager steps."""

Work = Callable[[], None]


class GraphRecorder(Protocol):
    """Captures the kernels launched by some work, to replay them."""

    def warm(self, work: Work) -> None:
        """Warms up: runs the work as it will be captured, so that libraries allocate their workspaces first."""

    def record(self, work: Work) -> Work:
        """Captures work without running it; returns a function that replays the same kernels on the same memory."""


class CudaGraphs:
    """Captures CUDA graphs on a side stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self._living = WeakSet[Any]()

    def warm(self, work: Work) -> None:
        """See :class:`GraphRecorder`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """See :class:`GraphRecorder`."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        if not self._living:
            # A memory pool is freed with its last graph, so the next stack's graphs need a new one. The old one, and
            # what the warm-up took, must be given back before: during a capture the allocator gives back nothing.
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the work's own error is more informative
                    self._end(graph)
                raise
            self._end(graph)
        self._living.add(graph)
        replay: Work = graph.replay
        return replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture."""
        try:
            graph.capture_end()
        except RuntimeError:
            # Up to PyTorch 2.11 the allocator believes ever after that this capture goes on: it reuses no memory of
            # other streams then, and cannot empty its cache. Later ones refuse to end it twice.
            names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the latter up to PyTorch 2.7
            end = next(found for name in names if (found := getattr(torch._C, name, None)) is not None)
            with suppress(RuntimeError):
                end(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            raise


class Capture:
    """Captures work until a capture fails; from then on work is launched eagerly.

    Args:
        recorder: captures graphs on the device.

    Attributes:
        refused: why capture failed; empty as long as it works.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self.refused = ""

    def record(self, work: Work) -> Work | None:
        """Captures work; returns None, and logs the reason once, if that fails.

        Raises:
            Exception: the device is out of memory.
        """
        try:
            return self.recorder.record(work)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            self.refused = (text_of(error).strip().splitlines() or [type(error).__name__])[0]
            _log.warning("steps are launched one by one, they cannot be recorded: %s", self.refused)
            return None


class DoubleBuffered(Protocol):
    """A stack that may alternate between two buffers; a graph is only valid for the buffer it was captured with.

    Attributes:
        phase: index of the buffer that is read next.
    """

    phase: int


class GraphedSteps:
    """Takes the steps of one stack: the first of each shape warms up, the second captures, the others replay.

    A replayed kernel reads the same addresses every time, so the step's number is a tensor on the device.

    Args:
        capture: captures the graphs.
        stack: the stacked models.
        take: takes a step, given its number (int64 of shape (1,)) and how many clients take part.
        counts: number of steps, by number of active clients.
        device: where the steps run.
    """

    def __init__(
        self,
        capture: Capture,
        stack: DoubleBuffered,
        take: Callable[[Tensor, int], None],
        counts: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self._capture, self._stack, self._take, self._counts = capture, stack, take, counts
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._warm: set[tuple[int, int]] = set()
        self._recorded: dict[tuple[int, int], tuple[Work, int]] = {}

    def take(self, active: int) -> None:
        """Takes the next step, of the first ``active`` clients."""
        key, run = (active, self._stack.phase), partial(self._run, active)
        if self._capture.refused or self._counts[active] < _WORTH:
            run()
            return
        if key not in self._warm:
            self._warm.add(key)
            self._capture.recorder.warm(run)
            return
        if key not in self._recorded:
            replay = self._capture.record(run)
            after, self._stack.phase = self._stack.phase, key[1]  # capturing runs nothing
            if replay is None:
                run()
                return
            self._recorded[key] = replay, after
        replay, self._stack.phase = self._recorded[key]
        replay()

    def _run(self, active: int) -> None:
        self._take(self._number, active)
        self._number.add_(1)
