"""Tells other threads of a host which clients' code runs just now, and collects what that code prints."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO, cast

from actors.hosting.failures import named
from actors.hosting.job import Job
from rayfl.engine.requests import SERVER
from rayfl.tracking.terminal import visible

_log = logging.getLogger("rayfl.clients")
_MOST_PRINTED = 20_000
"""Characters that are shown of what a client prints in one call."""


@dataclass(frozen=True)
class Report:
    """A host's report on the work that it is at.

    Attributes:
        clients: whose code runs; several where clients are stacked.
        seconds: for how long they have been at their procedure.
        printed: what clients of this call have printed so far, in lines that name them.
    """

    clients: tuple[int, ...]
    seconds: float
    printed: tuple[str, ...]


class AtWork:
    """A call of a host: who is at work, and lines of what they print.

    In its body, what the entering thread writes to ``sys.stdout`` and ``sys.stderr`` while clients are at work is
    theirs.

    Args:
        tell: called with each line as soon as it is complete; None: lines are kept in :attr:`printed`, and go where the
            process prints.

    Attributes:
        clients: whose code runs now.
        printed: the lines of the call, or of the last one.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._place = ""
        self._since = time.monotonic()
        self._used: Counter[tuple[int, ...]] = Counter()
        self._cut: Counter[tuple[int, ...]] = Counter()
        self._streams: tuple[_Stream, ...] = ()
        self._thread: int | None = None
        self.clients: tuple[int, ...] = ()
        self.printed: list[str] = []

    def on(self, job: Job) -> AtWork:
        """Begins a new call: enter it as a context."""
        self._place, self.printed = f"round {job.round}, {job.procedure}", []
        self._used, self._cut = Counter(), Counter()
        return self

    def __enter__(self) -> AtWork:
        self._thread = threading.get_ident()
        self._streams = (_Stream(self, sys.stdout), _Stream(self, sys.stderr))
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turn_to(())
        sys.stdout, sys.stderr = (stream.beneath for stream in self._streams)
        self._streams = ()
        for clients, count in self._cut.items():
            self._say(clients, f"... and {count:,} more characters, which are not shown")

    def begin(self, clients: Sequence[int]) -> None:
        """Takes note that clients begin with their procedures."""
        self._since = time.monotonic()
        self.turn_to(clients)

    def turn_to(self, clients: Sequence[int]) -> None:
        """Takes note of which of the clients that have begun are at work now."""
        if tuple(clients) != self.clients:
            for stream in self._streams:
                stream.end_line()
            self.clients = tuple(clients)

    def report(self) -> Report:
        """Returns what clients do now; for another thread."""
        return Report(self.clients, time.monotonic() - self._since, tuple(self.printed))

    def wrote(self, line: str) -> None:
        """Somebody at work has written a line."""
        left = _MOST_PRINTED - self._used[self.clients]
        self._used[self.clients] += min(len(line), left) + 1
        if len(line) > left:
            self._cut[self.clients] += len(line) - max(left, 0)
        if left > 0:
            self._say(self.clients, line[:left])

    def _say(self, clients: tuple[int, ...], text: str) -> None:
        line = f"{clients_named(clients)}, {self._place}: {text}"
        writer, self._thread = self._thread, None  # who is told may print it himself
        try:
            if self._tell is not None:
                self._tell(line)
            else:
                self.printed.append(line)
                print(line, flush=True)
        finally:
            self._thread = writer

    def is_heard(self) -> bool:
        """Returns whether what this thread writes is clients'."""
        return bool(self.clients) and threading.get_ident() == self._thread


class _Stream:
    """Stands in for ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, at_work: AtWork, beneath: TextIO) -> None:
        self._at_work = at_work
        self._line = ""
        self.beneath = beneath

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)

    def write(self, text: str) -> int:
        """Passes complete lines on."""
        if not self._at_work.is_heard():
            return self.beneath.write(text)
        *lines, rest = text.split("\n")
        for line in lines:
            self._extend(line)
            self._flush_line()
        self._extend(rest)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of them."""
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        """Takes what there is of a line for a whole one."""
        if self._line:
            self._flush_line()

    def _flush_line(self) -> None:
        line, self._line = self._line.rstrip("\r"), ""
        self._at_work.wrote(line)

    def _extend(self, text: str) -> None:
        """Adds to the line; what is written over after a carriage return, as progress bars do, is gone."""
        line = self._line + text
        shown = line.rstrip("\r")
        self._line = shown.rpartition("\r")[2] + line[len(shown) :][:1]
        if len(self._line) > _MOST_PRINTED:
            self.end_line()


def clients_named(clients: Sequence[int]) -> str:
    """``client 3``, or ``clients 3, 4``; or ``the server``."""
    if tuple(clients) == (SERVER,):
        return "the server"
    return f"client{'s' if len(clients) > 1 else ''} {named(list(clients))}"


def tell_printed(lines: Iterable[str]) -> None:
    """Gives lines that clients printed to the log ``rayfl.clients``."""
    for line in lines:
        _log.info("%s", line)


class _Console(logging.Handler):
    """Prints lines where this process prints."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one."""
        print(visible(record.getMessage()), flush=True)


@contextmanager
def printed_on_console() -> Iterator[None]:
    """Has what clients print appear on standard output, in addition to the log."""
    handler, level = _Console(), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
