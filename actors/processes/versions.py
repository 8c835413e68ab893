"""Compares the software of actors with the driver's: results depend on it, and a run is one run on all nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rayfl.errors import ResourceError
from rayfl.version import VERSION

_log = logging.getLogger("rayfl")


def versions() -> dict[str, str]:
    """Returns the versions of the packages that results depend on, as this process has imported them."""
    return {"rayfl": VERSION, "torch": str(torch.__version__), "numpy": np.__version__}


def check_releases(actors: Iterable[Mapping[str, Any]]) -> None:
    """Checks that actors have the driver's releases.

    Args:
        actors: descriptions of the actors.

    Raises:
        ResourceError: naming nodes, packages and releases.
    """
    found = _differences(actors, _release)
    if found:
        raise ResourceError(
            f"nodes have other releases than the driver: {'; '.join(found)}. Give all nodes the same environment"
        )


def warn_of_builds(actors: Iterable[Mapping[str, Any]]) -> None:
    """Logs other builds of the driver's releases, such as PyTorch's for CPUs (``+cpu``) beside one for GPUs.

    Args:
        actors: descriptions of actors with the driver's releases.
    """
    found = _differences(actors, str)
    if found:
        _log.warning(
            "nodes have other builds than the driver, with which last bits of results may differ: %s", "; ".join(found)
        )


def _release(version: str) -> str:
    """Returns a version without what names the build: ``2.9.0`` of ``2.9.0+cu130``."""
    return version.partition("+")[0]


def _differences(actors: Iterable[Mapping[str, Any]], compared: Callable[[str], str]) -> list[str]:
    """Returns one sentence a node and package, sorted."""
    own = versions()
    return sorted(
        {
            f"{actor['node']} has {package} {version}, the driver {own[package]}"
            for actor in actors
            for package, version in actor["versions"].items()
            if compared(version) != compared(own[package])
        }
    )
