"""Where all commands print, and the exit statuses they share."""

from __future__ import annotations

import os

from rich.console import Console

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
FAILED = 1
_WIDE = 200
"""Characters of a line where there is no terminal: tables in files and pipes are not cut."""


def out() -> Console:
    """Standard output, as wide as it is now."""
    console = Console(soft_wrap=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(soft_wrap=False, width=_WIDE)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True)
