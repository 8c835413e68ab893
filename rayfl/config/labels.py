"""Short labels of configurations: for tables and legends that have several of one method."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import combinations
from typing import Any

from rayfl.config.added import values_told
from rayfl.config.differences import ABSENT, flattened, text_of, varied

LONGEST = 40
"""Characters of a label, from which on it is shortened."""

_NAME = "name"

_SHORT = 12
"""Characters of a value that is never shortened."""

_DIGITS = 17
"""Significant digits of a float, at most."""


def labels(contents: Sequence[Mapping[str, Any]], longest: int = LONGEST) -> list[list[str]]:
    """Returns for each configuration the options that tell it from the others, as ``name=value``.

    If a label would be too long, values lose what all of them begin and end with, and floats the digits that tell no
    two of them apart. If that is not enough, options go that separate no two configurations which the others do not
    separate. What is left may still be longer.

    Args:
        contents: plain data with all values resolved.
        longest: characters of the options of a configuration, joined by a comma and a blank.
    """
    found = values_told(varied(contents))
    every = {path for content in contents for path in flattened(content)}
    options = dict(zip(_short_names(list(found), every), found.values(), strict=True))
    whole = {name: [_text(value) for value in values] for name, values in options.items()}
    if _length(whole) <= longest:
        return _parts(whole, len(contents))
    short = {name: _shortened(values) for name, values in options.items()}
    if _length(short) > longest:
        heads = {name for path, name in zip(found, options, strict=True) if path.endswith(f".{_NAME}")}
        kept = _separating(short, heads)
        short = {name: short[name] for name in short if name in kept}
    return _parts(short, len(contents))


def _short_names(paths: Sequence[str], every: Set[str]) -> list[str]:
    """Returns the last part of each path, or the whole path where another option ends so; no two are equal.

    The name of a section stands for the section, as in a command (``compression=sign``).

    Args:
        paths: of the options to be named.
        every: the paths of all options, also of those that do not differ (``train.rounds`` beside ``stages.rounds``).
    """
    sections = {path: path.removesuffix(f".{_NAME}") for path in {*paths, *every}}
    count = Counter(sections.values())
    whole = {path: section if count[section] == 1 else path for path, section in sections.items()}
    ends = {path: section.rpartition(".")[2] for path, section in sections.items()}
    count = Counter(ends.values())
    return [ends[path] if count[ends[path]] == 1 else whole[path] for path in paths]


def _parts(texts: Mapping[str, Sequence[str]], number: int) -> list[list[str]]:
    return [[f"{name}={values[place]}" for name, values in texts.items()] for place in range(number)]


def _length(texts: Mapping[str, Sequence[str]]) -> int:
    """Returns how long the longest label is."""
    number = max((len(values) for values in texts.values()), default=0)
    return max((len(", ".join(parts)) for parts in _parts(texts, number)), default=0)


def _text(value: Any) -> str:
    return "none" if value == ABSENT else text_of(value)


def _shortened(values: Sequence[Any]) -> list[str]:
    """Returns the values as texts that are as different as they were."""
    whole = [_text(value) for value in values]
    if all(len(text) <= _SHORT for text in whole):
        return whole
    for digits in range(3, _DIGITS + 1):
        short = [f"{value:.{digits}g}" if isinstance(value, float) else _text(value) for value in values]
        if len(set(short)) == len(set(whole)):
            break
    else:
        short = whole  # such as 0 and 0.0
    return _without_common(short) if any(len(text) > _SHORT for text in short) else short


def _without_common(texts: Sequence[str]) -> list[str]:
    """Returns the texts without the words that all of them begin and end with; an ellipsis stands for these."""
    words = [re.findall(r"[^/,\s]+|[/,\s]+", text) for text in texts]
    room = min(map(len, words)) - 1  # a word of each text stays
    first = next((place for place in range(room) if len({found[place] for found in words}) > 1), max(room, 0))
    room -= first
    last = next((place for place in range(room) if len({found[-1 - place] for found in words}) > 1), max(room, 0))
    return ["…" * (first > 0) + "".join(found[first : len(found) - last]) + "…" * (last > 0) for found in words]


def _separating(texts: Mapping[str, Sequence[str]], heads: Set[str]) -> set[str]:
    """Returns options that together separate all configurations which all options separate.

    The option that separates most of those still alike comes first; of equal ones the name of a section, which says
    what the section's other options are about, then the shortest.
    """
    number = len(next(iter(texts.values())))
    alike = {pair for pair in combinations(range(number), 2) if any(v[pair[0]] != v[pair[1]] for v in texts.values())}
    kept: set[str] = set()
    while alike:
        told = {name: {pair for pair in alike if v[pair[0]] != v[pair[1]]} for name, v in texts.items()}
        length = {name: len(name) + max(map(len, values)) for name, values in texts.items()}
        best = max(told, key=lambda name: (len(told[name]), name in heads, -length[name]))
        kept.add(best)
        alike -= told[best]
    return kept
