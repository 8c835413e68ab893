"""Lists in the configuration in which an item that stands twice can only be a mistake."""

from __future__ import annotations

from typing import Any

from pydantic import AfterValidator


def _each_once(given: Any) -> Any:
    """Refuses a tuple with an item twice; what is no tuple, in a field that takes both, is returned as it is."""
    if isinstance(given, tuple):
        for place, item in enumerate(given):
            if item in given[:place]:
                raise ValueError(f"{item if isinstance(item, int) else str(item)!r} stands there twice: name it once")
    return given


EACH_ONCE = AfterValidator(_each_once)
"""Beside a field's type: every item of its tuple stands there once."""
