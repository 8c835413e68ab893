"""The table of settings in presets/papers.yaml: papers, bases, and families of presets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paper(_Record):
    """A paper whose tables are presets.

    Attributes:
        short: method and venue, such as ``SuPerFed (KDD 2022)``.
        title: of the paper.
        authors: surnames.
    """

    short: str
    title: str
    authors: str


class Layer(_Record):
    """Settings that are laid over earlier ones.

    Attributes:
        about: what the presets are about, in a few words.
        note: what paper, public code and these settings do not agree on.
        config: sections of a configuration.
        methods: by method, its ``algorithm`` and other sections; ``row`` is the row of the results that is the paper's
            personalized number, if it is not the algorithm's own.
    """

    about: str = ""
    note: str = ""
    config: dict[str, Any] = {}
    methods: dict[str, dict[str, Any]] = {}


class Variants(_Record):
    """Copies of methods, one for each combination of values.

    Attributes:
        of: the methods that are copied.
        named: the copies' names, with ``{of}`` and the keys of ``over`` in braces.
        over: values by field of the algorithm, or by dotted path.
    """

    of: tuple[str, ...]
    named: str
    over: dict[str, tuple[Any, ...]]

    def copies(self, methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The copies' settings by name, made from those of the methods."""
        made: dict[str, dict[str, Any]] = {}
        for method in self.of:
            for values in itertools.product(*self.over.values()):
                name = self.named.replace("{of}", method)
                changes: dict[str, Any] = {}
                for path, value in zip(self.over, values, strict=True):
                    name = name.replace(f"{{{path}}}", str(value))
                    section, _, key = path.rpartition(".")
                    changes = merged(changes, {section or "algorithm": {key: value}})
                made[name] = merged(methods[method], changes)
        return made


class Family(Layer):
    """A row group of a table or figure.

    Attributes:
        name: of its presets, with the axes in braces.
        paper: key of the paper.
        table: number of the table or figure.
        own: the paper's own method, with which the presets run.
        bases: keys of what it stands on.
        axes: by axis and value, what that value changes.
        variants: further methods.
    """

    name: str
    paper: str
    table: str
    own: str
    bases: tuple[str, ...] = ()
    axes: dict[str, dict[str, Layer]] = {}
    variants: tuple[Variants, ...] = ()


class Settings(_Record):
    papers: dict[str, Paper]
    bases: dict[str, Layer]
    families: tuple[Family, ...]


def merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """``before`` changed by ``after``, mapping by mapping."""
    both = dict(before)
    for key, value in after.items():
        old: Any = both.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            value = merged(old, value)
        both[key] = value
    return both
