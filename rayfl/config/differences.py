"""Finds what differs between configurations, given as plain data with all their values resolved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ABSENT = "-"
"""In place of the value of a field that only the other configuration has."""


def flattened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all values by dotted path; lists are values, empty sections too."""
    return dict(_leaves(content, ""))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the fields in which two configurations differ: dotted path and both values, in the order of the first."""
    return [(path, left, right) for path, (left, right) in varied([first, second]).items()]


def varied(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the fields in which several configurations are not all equal: the value of each by dotted path.

    Sections come in the order of the configurations, and in a section its name first.
    """
    flat = [flattened(content) for content in contents]
    sections = list(dict.fromkeys(key for content in contents for key in content))
    paths = sorted(dict.fromkeys(path for one in flat for path in one), key=_order(sections))
    rows = {path: [one.get(path, ABSENT) for one in flat] for path in paths}
    present = {path: {path in one for one in flat} for path in paths}
    return {
        path: values
        for path, values in rows.items()
        if len(present[path]) > 1 or any(value != values[0] for value in values)
    }


def text_of(value: Any) -> str:
    """Returns a value of a configuration as text: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _order(sections: Sequence[str]) -> Callable[[str], tuple[int, bool]]:
    def key(path: str) -> tuple[int, bool]:
        section, _, field = path.partition(".")
        return sections.index(section), field != "name"

    return key


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
