"""What a misspelt name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` when a candidate resembles the word, else nothing."""
    found = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
