"""What differs between two configurations with all their values resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl.config.schema import ExperimentConfig

ABSENT = "-"
"""In place of the value of a field that only the other configuration has."""


def flattened(config: ExperimentConfig) -> dict[str, Any]:
    """All values by dotted path; lists are values, empty sections too."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def differences(first: ExperimentConfig, second: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """The fields in which two configurations differ: dotted path and both values, in the order of the schema."""
    left, right = flattened(first), flattened(second)
    paths = sorted({**left, **right}, key=_order(first))
    pairs = ((path, left.get(path, ABSENT), right.get(path, ABSENT)) for path in paths)
    return [(path, a, b) for path, a, b in pairs if a != b or (path in left) != (path in right)]


def _order(config: ExperimentConfig) -> Any:
    """Sections in the order of the schema, and in a section its name first."""
    sections = {name: position for position, name in enumerate(type(config).model_fields)}

    def key(path: str) -> tuple[int, bool]:
        section, _, field = path.partition(".")
        return sections.get(section, len(sections)), field != "name"

    return key


def _leaves(content: Mapping[str, Any], prefix: str) -> Any:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
