"""Options that there are no more: what stands in records of older runs, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfl.config.added import ABSENT, value_at, without


@dataclass(frozen=True)
class Removed:
    """An option that is gone.

    Attributes:
        default: the value at which it did nothing, and is left out without a word.
        since: the first version of rayfl that lacks it.
        instead: what to do, in words.
    """

    default: Any
    since: str
    instead: str


REMOVED: Mapping[str, Removed] = {
    "engine.kernel": Removed(
        "reference", "0.2.0", "leave it out: there is one step, which is as fast as the faster kernel was"
    ),
    "engine.lend_cores": Removed(
        False, "0.2.0", "leave it out; where a few clients are large, set cluster.threads_per_actor"
    ),
}
"""By dotted path."""


def removed_from(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns by dotted path the removed options that a configuration has at other values than their defaults."""
    found = {path: value_at(content, path) for path in REMOVED}
    return {path: value for path, value in found.items() if value is not ABSENT and value != REMOVED[path].default}


def without_removed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration without removed options."""
    return without(content, REMOVED)


def explain_removed(path: str, value: Any) -> str:
    """Returns what a configuration's error says of a removed option."""
    gone = REMOVED[path]
    return f"is gone since rayfl {gone.since} (got {value!r}): {gone.instead}"
