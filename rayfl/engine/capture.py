"""Steps of a stack that are recorded once and replayed, so that the host launches one graph a step."""

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
"""Steps of one shape, from which on it is recorded: the first two cost more than they would otherwise."""

Work = Callable[[], None]


class GraphRecorder(Protocol):
    """Records what is launched on a device."""

    def warm(self, work: Work) -> None:
        """Runs work as it will be recorded; libraries take their memory at such a first time."""

    def record(self, work: Work) -> Work:
        """Records work, without running it, and returns what runs it: the same operations on the same memory."""


class CudaGraphs:
    """Records CUDA graphs, on a stream of their own.

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
        if not self._living:
            # A pool of memory ends with the last of its graphs: those of the next stack cannot be recorded into it.
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the error of the work says more
                    graph.capture_end()
                raise
            graph.capture_end()
        self._living.add(graph)
        replay: Work = graph.replay
        return replay


class Capture:
    """Records steps while that succeeds.

    Args:
        recorder: of the device.

    Attributes:
        refused: why nothing is recorded any more; empty while steps are.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self.refused = ""

    def record(self, work: Work) -> Work | None:
        """Records work; None where it cannot be, which is said once.

        Raises:
            Exception: the device's memory does not suffice.
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
    """What is stepped on, and may use its memory in turns.

    Attributes:
        phase: whose turn it is.
    """

    phase: int


class GraphedSteps:
    """The steps of one stack: of those that are alike all but two are replays.

    They read the number of the step from the device, since all else that a recorded operation reads stays the same.

    Args:
        capture: records.
        stack: what is stepped on.
        take: takes a step, given its number (int64 of shape (1,)) and how many clients take part.
        counts: by number of clients, how many steps there will be.
        device: where they are taken.
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
            after, self._stack.phase = self._stack.phase, key[1]  # nothing has been done yet
            if replay is None:
                run()
                return
            self._recorded[key] = replay, after
        replay, self._stack.phase = self._recorded[key]
        replay()

    def _run(self, active: int) -> None:
        self._take(self._number, active)
        self._number.add_(1)
