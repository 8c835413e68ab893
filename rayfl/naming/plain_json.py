"""JSON of users' own files, in which no key may stand twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


class RepeatedKeyError(ValueError):
    """An object has a key twice, of which the last value alone would count."""


def read_json(text: str | bytes) -> Any:
    """The content of a text.

    Raises:
        RepeatedKeyError: an object has a key twice.
        ValueError, RecursionError: it is no JSON.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise RepeatedKeyError(f"the key {twice!r} stands twice in one object: write it once")
    return found
