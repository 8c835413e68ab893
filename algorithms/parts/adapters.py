"""Adapters of a pretrained model, as methods name and check them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from algorithms.parts.partial import part
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree


def check_adapters(method: str, network: Network) -> None:
    """Refuses a model that has no adapters.

    Args:
        method: what to call the method.
        network: the model.

    Raises:
        ConfigError: naming what to set.
    """
    if not network.groups.get("adapters"):
        raise ConfigError(
            f"{method} needs a model with adapters that are trained: set model=pretrained and model.folder "
            "(docs/adapters.md)"
        )


def adapters_of(model: Mapping[str, Tensor], network: Network) -> Tree:
    """Returns the model without its head."""
    return part(model, network.groups["adapters"])
