"""Paths on the command line: ``--out=~/x`` is meant as ``--out ~/x``, which a shell expands."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def at_home(given: Any) -> Any:
    """Returns a path, or each of a list, with ``~`` replaced by the home folder; what was not given is as it is."""
    if isinstance(given, list | tuple):
        return [at_home(one) for one in given]
    return given if given is None else Path(given).expanduser()
