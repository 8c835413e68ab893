"""Where all commands print, and the exit statuses they share."""

from __future__ import annotations

import os
import re

from rich.console import Console

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
FAILED = 1
_WIDE = 200
"""Characters of a line where there is no terminal: tables in files and pipes are not cut."""
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, colours or reverses its text, or cannot be written to it: not tabs and line ends."""


def visible(text: str) -> str:
    """A text with its control characters, surrogates and changes of direction as escapes, such as ``\\x1b``."""
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def out() -> Console:
    """Standard output, as wide as it is now."""
    console = Console(soft_wrap=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(soft_wrap=False, width=_WIDE)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True)
