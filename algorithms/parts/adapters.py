"""Adapters of a pretrained model, as methods name and check them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from algorithms.parts.partial import part
from algorithms.parts.requirements import check_low_rank
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.models.pretrained.mixing import is_delta
from rayfl.params import Tree

COMMON_FACTOR = (
    "where clients have one factor in common, the mean of the other is that of the products already, so set "
    "algorithm=fedavg, or train both"
)
"""Why a method that mends the error of averaged factors is for adapters of which both are trained."""


def check_adapters(method: str, network: Network) -> None:
    """Refuses a model that has no adapters of low rank.

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
    check_low_rank(method, network)


def check_no_magnitudes(option: str, network: Network, reason: str) -> None:
    """Refuses adapters with magnitudes (DoRA).

    Args:
        option: what cannot have them: a method, or an option as a user would write it.
        network: the model.
        reason: why, for the message.

    Raises:
        ConfigError: naming what to set.
    """
    if network.groups.get("magnitudes"):
        raise ConfigError(f"{option} needs model.adapter.use_dora=false: {reason}")


def check_both_factors(method: str, network: Network, reason: str, no_magnitudes: str) -> None:
    """Refuses a model without adapters, of whose factors one is not trained, or which have magnitudes.

    Args:
        method: what to call the method.
        network: the model.
        reason: why both factors must be trained, and what to do otherwise.
        no_magnitudes: why there can be no magnitudes.

    Raises:
        ConfigError: naming what to set.
    """
    check_adapters(method, network)
    check_no_magnitudes(method, network, no_magnitudes)
    if not (network.groups["lora_a"] and network.groups["lora_b"]):
        raise ConfigError(f"{method} needs model.adapter.trains=[a,b]: {reason}")


def added_and_rest(model: Mapping[str, Tensor]) -> tuple[Tree, Tree]:
    """Returns the matrices that are added to the base's, and the other tensors of a model."""
    added = [name for name in model if is_delta(name)]
    return part(model, added), part(model, [name for name in model if name not in added])


def adapters_of(model: Mapping[str, Tensor], network: Network) -> Tree:
    """Returns the model without its head."""
    return part(model, network.groups["adapters"])
