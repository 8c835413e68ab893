"""What identifies a run: its fingerprint, and those under which older rayfls have begun the same experiment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Content = Mapping[str, Any]
"""What results depend on, as plain data: a configuration without names, places and processes."""


FREE = frozenset({"name", "storage_path", "cluster", "clients", "storage", "tracking", "max_failures"})
"""Keys of a configuration that have no influence on results: names, places, processes."""


@dataclass(frozen=True)
class OlderRule:
    """How fingerprints were made before something was added that counts in all of them.

    Attributes:
        release: the last version of rayfl that made them so.
        content: makes of what counts today what counted then; None for an experiment that nobody could ask for then.
        devices: the types of devices on which a run that was begun then goes on to the same bits.
        changed: what is different on other devices, in words.
    """

    release: str
    content: Callable[[Content], Content | None]
    devices: frozenset[str]
    changed: str


def fingerprint_of(content: Content) -> str:
    """SHA-256 of what results depend on."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def without_places(model: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``model`` without the paths of folders whose content is known by its checksum."""
    content = {key: value for key, value in model.items() if key != "folder" or model.get("base") is None}
    adapter = content.get("adapter")
    if isinstance(adapter, Mapping):
        places = {"start": "sha256", "tokenizer": "text_tokens"}  # by the name of a place, what is known of its content
        known = {place for place, found in places.items() if adapter.get(found) is not None}
        content["adapter"] = {key: value for key, value in adapter.items() if key not in known}
    if "candidates" in content:
        content["candidates"] = [without_places(one) for one in content["candidates"]]
    return content


def older_fingerprints(content: Content) -> Iterator[tuple[str, OlderRule]]:
    """The fingerprints that older rayfls gave an experiment, the newest first, as far back as it could be asked for.

    One for each rule: those that a rule changes nothing in have the same as by the rule after it.
    """
    for rule in OLDER:
        older = rule.content(content)
        if older is None:
            return
        content = older
        yield fingerprint_of(content), rule


STEPS = "steps 2"
"""Counts in every fingerprint: another number for other last bits of local steps."""


def _of_0_1_0(content: Content) -> Content | None:
    """Without ``engine.precision``, of which there was float32 alone, and the number of steps that nobody compiled."""
    mode, precision, *others = content["engine"].split(", ")
    return {**content, "engine": mode} if precision == "float32" and others == [STEPS] else None


OLDER: tuple[OlderRule, ...] = (
    OlderRule(
        "0.1.0",
        _of_0_1_0,
        frozenset(),
        "local steps added in another order then (and GPUs multiplied with fewer bits), so that the last bits differ",
    ),
)
"""The newest first; each makes its content of that of the one before."""
