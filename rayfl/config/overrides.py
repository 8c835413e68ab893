"""What is written ``key=value`` on a command line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import yaml

from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import ConfigError

_log = logging.getLogger("rayfl")


def parse_override(text: str, example: str = "train.rounds=10", kind: str = "override") -> tuple[str, Any]:
    """The key, and the value as YAML.

    Args:
        text: what was written.
        example: how it should look, for the error.
        kind: what to call it there.

    Raises:
        ConfigError: when there is no key or no value, or it is not valid YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{kind} {text!r} must look like {example}")
    try:
        return key, read_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{kind} {text!r}: the value is not valid YAML: {error}") from None


def parse_overrides(
    texts: Sequence[str], example: str = "train.rounds=10", kind: str = "override"
) -> list[tuple[str, Any]]:
    """Keys and values in the order that they were written in; arguments and errors as for :func:`parse_override`.

    Of a key with two values the last counts, with a warning.

    Raises:
        ConfigError: also when one of them undoes another.
    """
    pairs = [parse_override(text, example, kind) for text in texts]
    refuse_undone(pairs)
    known: dict[str, Any] = {}
    for path, value in pairs:
        if path in known and known[path] != value:
            _log.warning("%s is given twice: %r counts, and not %r", path, value, known[path])
        known[path] = value
    return pairs


def refuse_undone(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuses values that later ones would replace without a word.

    Args:
        pairs: dotted paths and values, the first first.

    Raises:
        ConfigError: a section is given as a whole after a part of it.
    """
    for place, (path, _) in enumerate(pairs):
        for earlier, _ in pairs[:place]:
            if earlier.startswith(f"{path}."):
                raise ConfigError(
                    f"{path} is given after {earlier}, which it would undo, as it replaces the whole section: give "
                    f"{path} first"
                )
