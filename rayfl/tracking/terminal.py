"""Where all commands print, and the exit statuses they share.

What is printed comes from files, addresses and variables that others may have written. None of it is markup, and
control characters in it are shown as escapes.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
UNREAD = 141
"""128 + SIGPIPE, as shells report it: of commands that do nothing but follow, where nobody reads on."""
FAILED = 1
_WIDE = 200
"""Characters of a line where there is no terminal: tables in files and pipes are not cut."""
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, colours or reverses its text, or cannot be written to it: not tabs and line ends."""


_LEAST = 4
"""Characters that a column keeps whose cells can go on in further lines."""
_UNLIMITED = 100_000
_ESCAPES = "rayfl.escapes"


def visible(text: str) -> str:
    """A text with its control characters, surrogates and changes of direction as escapes, such as ``\\x1b``."""
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


class PlainConsole(Console):
    """A console that shows every text as it is: without markup, names of emoji, colours of numbers, and unseen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a cell; here, so that the widths of columns are those of what is shown."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Returns what is shown of anything; in a table nothing is cut, but goes on in the next line.

        A table for which there is too little room even so is wider than the terminal, which wraps its lines.
        """
        if isinstance(renderable, Table):
            for column in renderable.columns:
                column.overflow = "fold"
            options = options or self.options
            options = options.update(max_width=max(options.max_width, self._least_width(renderable, options)))
        for segment in super().render(renderable, options):
            if segment.control or not _UNSEEN.search(segment.text):
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints without cutting lines that are too long."""
        super().print(*objects, **{"crop": False, **options})

    def _least_width(self, table: Table, options: ConsoleOptions) -> int:
        """Returns the width in which no column is lost: those that may wrap have :data:`_LEAST` characters."""
        wide = options.update(max_width=_UNLIMITED)
        width = Measurement.get(self, wide, table).maximum
        for column in table.columns:
            if not column.no_wrap and column.width is None:
                texts = [*column.cells, *([column.header] if table.show_header else [])]
                natural = max((Measurement.get(self, wide, text).maximum for text in texts), default=0)
                least = column.min_width or _LEAST
                width -= max(natural, least) - least
        return width


def out() -> Console:
    """Standard output, as wide as it is now."""
    console = PlainConsole(soft_wrap=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else PlainConsole(soft_wrap=False, width=_WIDE)


def err() -> Console:
    """Standard error."""
    return PlainConsole(stderr=True)


def say(text: str) -> None:
    """Prints a line to standard output, which is not wrapped."""
    out().print(text, soft_wrap=True)


def warn(text: str) -> None:
    """Prints a line to standard error, which is not wrapped."""
    err().print(text, soft_wrap=True)


def lose_nothing() -> None:
    """Has standard output show as escapes, such as ``\\u00e9``, what its encoding lacks, in place of an error.

    The escapes are JSON's. And a reader that goes, as ``head`` does, ends no command: what it prints from then on is
    lost, and what it does, and its exit status, are as ever. A full disk ends none either: :func:`lost_output` knows.
    """
    sys.stdout, sys.stderr = map(_outlasting, (sys.stdout, sys.stderr))
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        codecs.register_error(_ESCAPES, _escaped)
        stream.reconfigure(errors=_ESCAPES)


class _Outlasting(io.FileIO):
    """A pipe that may be written to when nobody reads it any more, or a file whose disk may be full."""

    unread = False
    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.unread = True
        except BlockingIOError:
            raise
        except OSError as error:
            self.lost = error
        return memoryview(data).nbytes


def _outlasting(stream: Any) -> Any:
    """Returns a standard stream; unless it is a terminal, as one that outlasts its reader and the room on its disk."""
    try:
        descriptor = stream.fileno()
        os.fstat(descriptor)
        if stream.isatty():
            return stream
    except (AttributeError, OSError):  # closed, or one of a test's
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlasting(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def unread() -> bool:
    """Returns whether nobody can read what standard output gets from now on, as far as what was printed tells."""
    raw = _raw_output()
    return raw is not None and (raw.unread or raw.lost is not None)


def lost_output() -> str:
    """Returns why something that was printed is not in standard output; empty if all is, or its reader has gone."""
    sys.stdout.flush()
    raw = _raw_output()
    return "" if raw is None or raw.lost is None else raw.lost.strerror or str(raw.lost)


def _raw_output() -> _Outlasting | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Outlasting) else None


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2)), error.end


def write(text: str) -> None:
    """Writes to standard output what is there for programs: as it is, but to a terminal with escapes."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class VisibleFormatter(logging.Formatter):
    """Lines of a log that do nothing to the terminal on which somebody reads them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or the lines of one with a traceback."""
        return visible(super().format(record))


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Prints a warning of some library, as ``warnings.showwarning``."""
    (file or sys.stderr).write(visible(warnings.formatwarning(message, category, filename, lineno, line)))


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error that nothing has caught, as ``sys.excepthook``."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))
