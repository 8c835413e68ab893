"""Options that are younger than the first release, and what they change in a run's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADDED: Mapping[str, Any] = {
    "algorithm.one_sample": "paper",
    "dataset.labels": "as_found",
}
"""By dotted path, the value that stands for what was done before there was the option.

At that value an option does not count in the fingerprint, so that runs from before continue. A default that does
something else than was done before is not that value, and counts.
"""


def without_added(content: dict[str, Any]) -> dict[str, Any]:
    """Leaves out of a plain configuration the options of :data:`ADDED` that are at the value of before."""
    for path, before in ADDED.items():
        *parents, key = path.split(".")
        section: Any = content
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and section[key] == before:
            del section[key]
    return content
