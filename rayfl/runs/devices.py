"""The device that a command computes on."""

from __future__ import annotations

import torch

from rayfl.errors import ConfigError


def device_of(name: str) -> torch.device:
    """Returns the device that ``--device`` names.

    Args:
        name: ``cpu``, ``cuda``, or ``auto``: cuda if there is one.

    Raises:
        ConfigError: when there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: there is no GPU here: leave it out, or set it to cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
