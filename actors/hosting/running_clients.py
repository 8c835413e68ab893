"""Tracks which clients' code a host is running, and collects what that code prints."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO, cast

from actors.hosting.failures import named
from actors.hosting.job import Job
from rayfl.engine.updates.requests import SERVER
from rayfl.tracking.terminal import visible

_log = logging.getLogger("rayfl.clients")
_MOST_PRINTED = 20_000
"""Limit on the characters shown of what a client prints in one call."""


@dataclass(frozen=True)
class Report:
    """What a host is doing.

    Attributes:
        clients: ids of the clients whose code is running; several if clients are stacked.
        seconds: time since they started their procedure.
        printed: lines that clients have printed in this call so far, each prefixed with the client.
        work: the host's own work under way (such as ``restoring states``), and for how many seconds. A commit may be
            among it while clients' code is running.
    """

    clients: tuple[int, ...]
    seconds: float
    printed: tuple[str, ...]
    work: Mapping[str, float] = field(default_factory=dict)


class RunningClients:
    """Tracks the clients whose code runs during a call of a host, and captures what they print.

    It is a context manager. Inside it, writes of the entering thread to ``sys.stdout`` and ``sys.stderr`` are
    attributed to the running clients, if there are any.

    Args:
        tell: called with each complete line. If None, lines are collected in :attr:`printed` and printed by this
            process.

    Attributes:
        clients: ids of the clients whose code is running.
        printed: lines of the current call, or of the last one.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._place = ""
        self._since = time.monotonic()
        self._used: Counter[tuple[int, ...]] = Counter()
        self._cut: Counter[tuple[int, ...]] = Counter()
        self._streams: tuple[_Stream, ...] = ()
        self._thread: int | None = None
        self._work = ("waiting for a call or its arguments", self._since)
        self._committing: float | None = None
        self.clients: tuple[int, ...] = ()
        self.printed: list[str] = []

    def start_call(self, job: Job) -> RunningClients:
        """Starts a new call; returns the context manager to enter."""
        self._place, self.printed = f"round {job.round + 1}, {job.procedure}", []
        self._used, self._cut = Counter(), Counter()
        return self

    def __enter__(self) -> RunningClients:
        self.turn_to("preparing clients")
        self._thread = threading.get_ident()
        self._streams = (_Stream(self, sys.stdout), _Stream(self, sys.stderr))
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.switch_to(())
        self.turn_to("waiting for a call or its arguments")
        sys.stdout, sys.stderr = (stream.original for stream in self._streams)
        self._streams = ()
        for clients, count in self._cut.items():
            self._emit(clients, f"... and {count:,} more characters, which are not shown")

    def begin(self, clients: Sequence[int]) -> None:
        """Notes that clients start their procedures."""
        self._since = time.monotonic()
        self.switch_to(clients)

    def switch_to(self, clients: Sequence[int]) -> None:
        """Notes which of the started clients are running now."""
        if tuple(clients) != self.clients:
            for stream in self._streams:
                stream.end_line()
            if not clients:
                self.turn_to("preparing clients")
            self.clients = tuple(clients)

    def turn_to(self, work: str) -> None:
        """Notes which work of its own the host begins, now that no clients' code is running."""
        self._work = (work, time.monotonic())

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Notes that another thread of the host commits."""
        self._committing = time.monotonic()
        try:
            yield
        finally:
            self._committing = None

    def report(self) -> Report:
        """Returns what the host is doing; called by another thread."""
        clients, now = self.clients, time.monotonic()
        begun = [] if clients else [self._work]
        if (since := self._committing) is not None:
            begun.append(("committing", since))
        return Report(clients, now - self._since, tuple(self.printed), {work: now - since for work, since in begun})

    def add_line(self, line: str) -> None:
        """Adds a line that the running clients have printed."""
        left = _MOST_PRINTED - self._used[self.clients]
        self._used[self.clients] += min(len(line), left) + 1
        if len(line) > left:
            self._cut[self.clients] += len(line) - max(left, 0)
        if left > 0:
            self._emit(self.clients, line[:left])

    def _emit(self, clients: tuple[int, ...], text: str) -> None:
        line = f"{describe_clients(clients)}, {self._place}: {text}"
        writer, self._thread = self._thread, None  # the callback may print the line itself
        try:
            if self._tell is not None:
                self._tell(line)
            else:
                self.printed.append(line)
                print(line, flush=True)
        finally:
            self._thread = writer

    def captures(self) -> bool:
        """Returns whether writes of the calling thread are attributed to clients."""
        return bool(self.clients) and threading.get_ident() == self._thread


class _Stream:
    """Replaces ``sys.stdout`` or ``sys.stderr`` and passes lines of clients on."""

    def __init__(self, running: RunningClients, original: TextIO) -> None:
        self._running = running
        self._line = ""
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def write(self, text: str) -> int:
        """Passes complete lines on, and keeps the rest."""
        if not self._running.captures():
            return self.original.write(text)
        *lines, rest = text.split("\n")
        for line in lines:
            self._extend(line)
            self._flush_line()
        self._extend(rest)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several lines."""
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        """Passes an incomplete line on as a complete one."""
        if self._line:
            self._flush_line()

    def _flush_line(self) -> None:
        line, self._line = self._line.rstrip("\r"), ""
        self._running.add_line(line)

    def _extend(self, text: str) -> None:
        """Appends to the line; a carriage return discards what is before it, as progress bars intend."""
        line = self._line + text
        shown = line.rstrip("\r")
        self._line = shown.rpartition("\r")[2] + line[len(shown) :][:1]
        if len(self._line) > _MOST_PRINTED:
            self.end_line()


def describe_clients(clients: Sequence[int]) -> str:
    """Returns ``client 3``, ``clients 3, 4`` or ``the server``."""
    if tuple(clients) == (SERVER,):
        return "the server"
    return f"client{'s' if len(clients) > 1 else ''} {named(list(clients))}"


def log_printed(lines: Iterable[str]) -> None:
    """Writes lines that clients printed to the log ``rayfl.clients``."""
    for line in lines:
        _log.info("%s", line)


class _Console(logging.Handler):
    """Prints log records on standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        print(visible(record.getMessage()), flush=True)


@contextmanager
def printed_on_console() -> Iterator[None]:
    """Shows what clients print on standard output, in addition to the log."""
    handler, level = _Console(), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
