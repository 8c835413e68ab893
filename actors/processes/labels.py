"""Selects nodes by their labels, as Ray does.

Ray gives nodes labels such as ``ray.io/accelerator-type: H100``, further ones with ``ray start --labels``. From version
2.49 on it places actors by them; what is planned here must be what it then does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import ray

from rayfl.errors import ConfigError

LEAST_VERSION = (2, 49)
_AMONG = re.compile(r"(!?)in\((.*)\)")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether a selector matches a node.

    Args:
        labels: labels of the node.
        selector: conditions by key, ``value``, ``!value``, ``in(one,other)`` or ``!in(one,other)``, without spaces. All
            must hold. A node without the key has none of the values.
    """
    return all(_holds(labels.get(key), wanted) for key, wanted in selector.items())


def _holds(value: str | None, wanted: str) -> bool:
    among = _AMONG.fullmatch(wanted)
    if among is not None:
        return (value in among[2].split(",")) != bool(among[1])
    if wanted.startswith("!"):
        return value != wanted[1:]
    return value == wanted


def check_version(selector: Mapping[str, str]) -> None:
    """Checks that Ray can place actors by labels, if a selector is given.

    Raises:
        ConfigError: when Ray is too old.
    """
    found = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if selector and found < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(
            f"cluster.label_selector needs Ray {least} or newer, this is {ray.__version__}: pip install 'ray>={least}'"
        )
