"""Where in a user's own files an error arose: the few lines of a traceback that its author can change."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

_HOME = Path(__file__).parent.parent.parent
_PACKAGES = ("rayfl", "actors", "algorithms", "cluster")
_INSTALLED = {"site-packages", "dist-packages"}
_CYTHON = {".pyx", ".pxi", ".pxd"}
_MOST_FRAMES = 8


def own_frames(error: BaseException, authors: Iterable[type] = ()) -> str:
    """The frames of an error's traceback that lie in a user's files, as Python shows them, without a line's repetition.

    Args:
        error: what was raised; frames of the errors that it was raised from follow its own.
        authors: classes whose modules count as the user's, wherever they are installed.

    Returns:
        Lines to append to a message, the innermost frame last; empty if there is none. Of many, the last eight.
    """
    modules = [sys.modules.get(parent.__module__) for author in authors for parent in author.__mro__]
    named = {str(getattr(module, "__file__", None)) for module in modules}
    found = {
        (frame.filename, frame.lineno or 0, frame.name): frame.line or ""
        for one in _chain(error)
        for frame in traceback.extract_tb(one.__traceback__)
        if is_own(frame.filename, frame.filename in named)
    }
    return "".join(_lines(*place, line) for place, line in list(found.items())[-_MOST_FRAMES:])


def own_definition(function: Callable[..., Any]) -> str:
    """Returns where in a user's files a function is defined, in the same form; empty if it is not."""
    code = getattr(function, "__code__", None)
    if code is None or not is_own(code.co_filename):
        return ""
    return _lines(code.co_filename, code.co_firstlineno, code.co_name, "")


def complete(error: BaseException) -> str:
    """The whole traceback of an error, and those of the errors that it came from."""
    return "".join(traceback.format_exception(error)).rstrip("\n")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        yield found
        found = found.__cause__


def _lines(file: str, line: int, name: str, source: str) -> str:
    return f'\n  File "{file}", line {line}, in {name}' + (f"\n    {source}" if source else "")


@lru_cache(maxsize=1024)
def is_own(file: str, named: bool = False) -> bool:
    """Whether a file is a user's own: not Python's, not rayfl's, and not of an installed package unless it is named."""
    if file.startswith("<"):
        return False
    path = Path(file)
    if any(path.is_relative_to(_HOME / package) for package in _PACKAGES):
        return False
    if named:
        return True
    if path.suffix in _CYTHON and not path.is_file():  # a package's, known by its place in the package's sources
        return False
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not _INSTALLED & set(path.parts) and not any(path.is_relative_to(place) for place in standard)
