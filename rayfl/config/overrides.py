"""What is written ``key=value`` on a command line."""

from __future__ import annotations

from typing import Any

import yaml

from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import ConfigError


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
