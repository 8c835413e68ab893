"""From presets, YAML files and dotted overrides to a validated configuration."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rayfl.config.added import values_of_before
from rayfl.config.beginning import settled
from rayfl.config.messages import explain, problems
from rayfl.config.overrides import parse_overrides
from rayfl.config.own_code import schema_without_code
from rayfl.config.paper_presets import preset_names as preset_names
from rayfl.config.paper_presets import preset_text as preset_text
from rayfl.config.plain_yaml import read_yaml, write_yaml
from rayfl.config.removed import explain_removed, removed_from, without_removed
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, RayflError
from rayfl.naming.objects import names_an_object
from rayfl.naming.spelling import nearest

_NAMED_SECTIONS = (
    "algorithm",
    "dataset",
    "partition",
    "stages",
    "task",
    "model",
    "system",
    "compression",
    "aggregator",
    "selection",
    "contribution",
)
DEFAULT_PRESET = "quickstart"
STANDARD_INPUT = "-"


def load_config(
    schema: type[ExperimentConfig],
    source: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    trust: bool = True,
) -> ExperimentConfig:
    """Reads and validates a configuration.

    Args:
        schema: the configuration class.
        source: a preset's name, a YAML file, ``-`` for YAML on standard input, a mapping, or None for the preset
            ``quickstart``.
        overrides: ``dotted.path=value`` strings (the value is YAML), or a mapping of dotted paths to values.
            ``algorithm=floco`` is short for ``algorithm={name: floco}``; ``algorithm=my_module:MyMethod`` is a user's
            own class.
        trust: whether a user's own method that the source names is imported, to be validated and to have its defaults;
            else it is a ``rayfl.config.own_code.NamedMethod``. What the overrides name is imported in any case.

    Raises:
        ConfigError: listing every problem with its path, the allowed values and the nearest name.
    """
    content, place = _read(source)
    pairs = overrides_given(overrides)
    content = {key: _expanded(key, value) for key, value in content.items()}
    for path, value in pairs:
        _set(content, path, value)
    if gone := removed_from(content):
        raise ConfigError(problems(place, {path: [explain_removed(path, value)] for path, value in gone.items()}))
    content = without_removed(content)
    if not trust:
        schema = schema_without_code(schema, content, names_in(pairs))
    try:
        config = schema.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, schema.with_method(content), place)) from None
    # pydantic takes them for numbers like others. Texts become numbers in it, such as 1e400.
    values = config.model_dump()
    wrong = {path: [f"must be a finite number (got {value})"] for path, value in _not_finite(values)}
    wrong |= {
        path: [f"must be a number (got {str(value).lower()})"] for path, value in _taken_for_numbers(content, values)
    }
    if wrong:
        raise ConfigError(problems(place, wrong))
    here = [name for name in names_in(values) if name.startswith("__main__:")]
    if here and config.cluster.backend == "ray":
        raise ConfigError(
            f"{', '.join(here)} is code of a notebook or script, which actors cannot import: save it in a file "
            "my_module.py in the current folder and name it my_module:NAME, or set cluster.backend=inline"
        )
    model = config.model.told(partial(_class_names, config)).settled()
    found = {"init": settled(config.init), "model": model, "dataset": config.dataset.settled()}
    same = all(value is getattr(config, key) for key, value in found.items())
    return config if same else config.model_copy(update=found)


def _class_names(config: ExperimentConfig) -> tuple[str, ...]:
    """Returns the names of the data's classes; none where they have none, or are not there yet."""
    with suppress(RayflError, OSError):
        return config.dataset.aimed_at(config.task.target).class_names()
    return ()


def _not_finite(content: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Dotted path and value of each number that is infinite, or none at all."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _not_finite(value, f"{place}.{key}" if place else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _not_finite(value, f"{place}.{number}")
    elif isinstance(content, float) and not math.isfinite(content):
        yield place, content


def _taken_for_numbers(content: Any, values: Any, place: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted path and value of each truth value of a content that has become a number among the validated values."""
    if isinstance(content, Mapping) and isinstance(values, Mapping):
        pairs = [(str(key), value, values.get(key)) for key, value in content.items()]
    elif isinstance(content, list | tuple) and isinstance(values, list | tuple) and len(content) == len(values):
        pairs = [(str(n), *pair) for n, pair in enumerate(zip(content, values, strict=True))]
    else:
        if isinstance(content, bool) and isinstance(values, int | float) and not isinstance(values, bool):
            yield place, content
        return
    for key, inner, value in pairs:
        yield from _taken_for_numbers(inner, value, f"{place}.{key}" if place else key)


def overrides_given(overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Overrides as dotted paths with values; raises ConfigError for texts of which one undoes another."""
    return list(overrides.items()) if isinstance(overrides, Mapping) else parse_overrides(overrides)


def names_in(value: Any) -> list[str]:
    """All names ``module:name`` somewhere in a value."""
    if names_an_object(value):
        return [str(value)]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [name for part in inner for name in names_in(part)]


def as_recorded(
    content: Mapping[str, Any], load: Callable[[Mapping[str, Any], Mapping[str, Any]], ExperimentConfig]
) -> ExperimentConfig:
    """The configuration of a run whose ``config.yaml`` an older rayfl may have written.

    Options that are younger than the record have the values that stand for what was done before. Those that there are
    no more are left out; with other values than their defaults such a run can be read, but not continued.

    Args:
        content: of ``config.yaml``.
        load: makes the configuration of content and of values by dotted path.
    """
    content = without_removed(content)
    config = load(content, {})
    before = values_of_before(content, config.model_dump(mode="json"))
    return load(content, before) if before else config


def to_yaml(config: ExperimentConfig) -> str:
    """A configuration as YAML that :func:`load_config` reads back to an equal one."""
    return write_yaml(config.model_dump(mode="json"))


def _read(source: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The raw content and what to call its place in messages."""
    if isinstance(source, Mapping):
        return dict(source), "configuration"
    name = DEFAULT_PRESET if source is None else str(source)
    if name == STANDARD_INPUT:
        return _parse_yaml(sys.stdin.read(), "standard input"), "standard input"
    if name in preset_names():
        return _parse_yaml(preset_text(name), f"preset {name}"), f"preset {name}"
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{name!r} is neither a file nor a preset{nearest(name, preset_names())}; `rayfl list presets` lists them"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return _parse_yaml(text, str(path)), str(path)


def _parse_yaml(text: str, place: str) -> dict[str, Any]:
    try:
        content = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{place} must be a mapping of sections (algorithm, dataset, model, train, ...)")
    return content


def _expanded(key: str, value: Any) -> Any:
    """``algorithm: floco`` means ``algorithm: {name: floco}``."""
    if key in _NAMED_SECTIONS and callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(
            f"{key} is the object {name} itself, but every process has to import it: save it in a file, or a function "
            f"that makes it, and give its name as a text, such as {key}='my_module:{name}' for my_module.py in the "
            "current folder"
        )
    return {"name": value} if key in _NAMED_SECTIONS and isinstance(value, str) else value


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    node = content
    for depth, parent in enumerate(parents):
        inner = node.get(parent)
        if inner is None:
            inner = {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"override {path}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        node[parent] = dict(inner)
        node = node[parent]
    node[key] = _expanded(key, value) if not parents else value
