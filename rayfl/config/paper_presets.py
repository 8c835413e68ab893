"""Presets for the tables and figures of the papers, expanded from one table of settings, ``presets/papers.yaml``.

A family is a row group of a paper's table. It stands on bases, and every combination of its axes' values is a preset.
What comes later changes what came before: bases, family, axes; a section under another ``name`` replaces the earlier
one. Each preset knows the settings of every method the paper compares on it.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from rayfl.config.paper_settings import Family, Paper, Settings, Variants, merged
from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import ConfigError
from rayfl.naming.spelling import nearest

SETTINGS_FILE = "papers.yaml"
REFERENCE_FILE = "reference.yaml"
_TABLES = {SETTINGS_FILE, REFERENCE_FILE}
"""Files among the presets that are none."""

_NAMED = ("dataset", "partition", "model")
_ORDER = (
    "dataset",
    "transform",
    "augment",
    "partition",
    "long_tail",
    "holdout",
    "noise",
    "labelled",
    "stages",
    "model",
    "algorithm",
    "train",
    "evaluation",
)
_ROW = "row"
_WIDTH = 118


@dataclass(frozen=True)
class PaperPreset:
    """One preset.

    Attributes:
        name: what a configuration calls it.
        paper: the paper.
        table: number of the table or figure.
        about: data and clients, in a few words.
        notes: what paper, public code and preset do not agree on.
        own: the paper's own method.
        content: the configuration, with that method.
        methods: raw settings by method.
        variants: of which methods there are copies, and with what values.
    """

    name: str
    paper: Paper
    table: str
    about: str
    notes: tuple[str, ...]
    own: str
    content: Mapping[str, Any] = field(repr=False)
    methods: Mapping[str, Mapping[str, Any]] = field(repr=False)
    variants: tuple[Variants, ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The preset as YAML, with its notes as comments."""
        head = [f"{self.paper.short}, {self.table}: {self.about}", *self.notes]
        lines = [line for part in head for line in textwrap.wrap(part, _WIDTH)]
        body = yaml.safe_dump(dict(self.content), sort_keys=False, default_flow_style=None, width=_WIDTH)
        return "".join(f"# {line}\n" for line in lines) + body


@lru_cache
def paper_presets() -> Mapping[str, PaperPreset]:
    """All presets of papers by name."""
    text = (resources.files("rayfl") / "presets" / SETTINGS_FILE).read_text(encoding="utf-8")
    return expanded(read_yaml(text))


def preset_text(name: str) -> str:
    """A preset's YAML."""
    made = paper_presets().get(name)
    if made is not None:
        return made.text
    return (resources.files("rayfl") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def preset_names() -> list[str]:
    """The presets that come with rayfl: files, and those of the papers' tables."""
    folder = resources.files("rayfl") / "presets"
    files = {entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")} - _TABLES
    return sorted([*(file.removesuffix(".yaml") for file in files), *paper_presets()])


def paper_preset(name: str) -> PaperPreset:
    """One preset; raises ConfigError, naming the nearest, if there is none of this name."""
    presets = paper_presets()
    if name not in presets:
        raise ConfigError(f"no preset of a paper's table is called {name!r}{nearest(name, presets)}")
    return presets[name]


def method_settings(preset: str, method: str) -> dict[str, Any]:
    """Returns what runs a method in a preset's setting, as overrides for :func:`rayfl.config.loading.load_config`.

    Args:
        preset: name of a paper's preset.
        method: one of its methods (:attr:`PaperPreset.methods`).

    Returns:
        Dotted paths with values; ``algorithm`` as a whole.

    Raises:
        ConfigError: there is no such preset or method; names the nearest.
    """
    overrides: dict[str, Any] = {}
    for section, value in _method(preset, method).items():
        if section == _ROW:
            continue
        whole = not isinstance(value, Mapping) or section == "algorithm" or "name" in value
        overrides |= {section: value} if whole else {f"{section}.{key}": inner for key, inner in value.items()}
    return overrides


def method_row(preset: str, method: str) -> str | None:
    """The row of the results that is the paper's personalized number; None: the algorithm's own personalized row.

    Raises:
        ConfigError: there is no such preset or method; names the nearest.
    """
    row: str | None = _method(preset, method).get(_ROW)
    return row


def expanded(settings: Mapping[str, Any]) -> dict[str, PaperPreset]:
    """The presets that a table of settings stands for, by name.

    Args:
        settings: content of ``papers.yaml``.

    Raises:
        ValueError: the settings are malformed, or two presets have one name.
    """
    known = Settings.model_validate(settings)
    presets: dict[str, PaperPreset] = {}
    for family in known.families:
        for preset in _members(family, known):
            if preset.name in presets:
                raise ValueError(f"two presets are called {preset.name}")
            presets[preset.name] = preset
    return presets


def _members(family: Family, known: Settings) -> Iterable[PaperPreset]:
    bases = [known.bases[key] for key in family.bases]
    for values in itertools.product(*(axis.items() for axis in family.axes.values())):
        labels = dict(zip(family.axes, (label for label, _ in values), strict=True))
        abouts = {axis: layer.about or label for axis, (label, layer) in zip(family.axes, values, strict=True)}
        layers = [*bases, family, *(layer for _, layer in values)]
        config: Any = {}
        methods: Any = {}
        for layer in layers:
            config, methods = merged(config, layer.config), merged(methods, layer.methods)
        methods = {name: {**settings, "algorithm": _algorithm(name, settings)} for name, settings in methods.items()}
        for variants in family.variants:
            methods |= variants.copies(methods)
        yield PaperPreset(
            family.name.format(**labels),
            known.papers[family.paper],
            family.table,
            family.about.format(**abouts),
            tuple(layer.note for layer in layers if layer.note),
            family.own,
            _content(config, methods[family.own]),
            methods,
            family.variants,
        )


def _content(config: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in which a method runs, sections in the order in which one reads them."""
    config = {
        key: {"name": value} if key in _NAMED and isinstance(value, str) else value for key, value in config.items()
    }
    content = merged(config, {section: value for section, value in method.items() if section != _ROW})
    return {key: content[key] for key in sorted(content, key=_ORDER.index)}


def _algorithm(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``algorithm``; the method's name is the algorithm's where none is given."""
    return {"name": method, **settings.get("algorithm", {})}


def _method(preset: str, method: str) -> Mapping[str, Any]:
    methods = paper_preset(preset).methods
    if method not in methods:
        raise ConfigError(
            f"preset {preset} has no method {method!r}{nearest(method, methods)}; it has {', '.join(methods)}"
        )
    return methods[method]
