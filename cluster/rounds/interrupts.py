"""Ctrl-C and SIGTERM: the first asks the run to stop after its round, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rayfl.errors import StopSignal

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a run that SIGTERM ended, as shells report it."""


class Interrupted(StopSignal, KeyboardInterrupt):
    """Ctrl-C ended the run."""


class Terminated(StopSignal, SystemExit):
    """SIGTERM ended the run; uncaught, it ends the process quietly with exit status 143."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class StopRequest:
    """Records whether the run was asked to stop, and by which signal.

    Args:
        grace_s: seconds after SIGTERM in which the current round may end.
        end: what the run finishes before it stops, in words for the user.

    Attributes:
        patient: whether there is a round to finish; if not, the first signal stops the run at once.
        hurried: whether a signal has stopped the run at once.
    """

    def __init__(self, grace_s: float, end: str = "this round") -> None:
        self.patient = False
        self.hurried = False
        self._end = end
        self._grace_s = grace_s
        self._signal: int | None = None
        self._timer: threading.Timer | None = None

    @property
    def requested(self) -> bool:
        """Returns whether the run should stop after the current round."""
        return self._signal is not None

    def error(self) -> BaseException:
        """Returns the exception that a stopped run raises: Interrupted, which is a KeyboardInterrupt, or Terminated."""
        return Terminated() if self._signal == signal.SIGTERM else Interrupted()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        self.hurried = self._signal is not None or not self.patient
        self._signal = self._signal or number
        if self.hurried:
            raise self.error()
        if number == signal.SIGTERM:
            _say(f"SIGTERM: stops after {self._end}, or in {self._grace_s:g} s")
            # The second signal comes from this process: SIGALRM may be used by others.
            self._timer = threading.Timer(self._grace_s, os.kill, (os.getpid(), signal.SIGTERM))
            self._timer.daemon = True
            self._timer.start()
        else:
            _say(f"stops after {self._end}; Ctrl-C again stops at once")

    def settle(self) -> None:
        """Cancels the deadline, since the round has ended: writing the commit may take longer."""
        if self._timer is not None:
            self._timer.cancel()


def _say(text: str) -> None:
    """Writes to standard error without Python's buffers, whose locks the interrupted code may hold."""
    os.write(2, f"{text}\n".encode())


@contextmanager
def stop_requests(grace_s: float, end: str = "this round") -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM during a run, and restores the previous handlers at its end.

    Enter it after ``ray.init``, which sets handlers of its own. Outside the main thread Python allows no handlers:
    then no signal is caught.

    Args:
        grace_s: see :class:`StopRequest`.
        end: see :class:`StopRequest`.
    """
    request = StopRequest(grace_s, end)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    except (KeyboardInterrupt, SystemExit, SystemError) as error:
        # Where Ray waits it raises an exception of its own in place of the handler's.
        if request.hurried and not isinstance(error, StopSignal):
            raise request.error() from None
        raise
    finally:
        request.settle()
        for number, handler in before.items():
            # None: a handler that was not set from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
