"""rayfl: personalized federated learning on Ray.

The names below are the public interface; they are imported when first used, so that ``import rayfl`` is quick
and ``rayfl.params`` pulls in neither Ray nor the floors above.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl import renamed
from rayfl.version import VERSION as __version__

_PUBLIC = {
    "run": "cluster.run",
    "Result": "rayfl.experiment.result",
    "Callback": "rayfl.tracking.callback",
    "Algorithm": "algorithms.base",
    "Averaging": "algorithms.base",
    "Client": "rayfl.engine.client",
    "Clients": "algorithms.clients",
    "Server": "rayfl.engine.server",
    "Predictor": "rayfl.tasks.base",
    "NetworkTask": "rayfl.tasks.base",
    "ElementwiseOptimizer": "rayfl.optimization.elementwise",
    "Weighted": "rayfl.aggregation.exact_sum",
    "RayflError": "rayfl.errors",
    "import_leaf": "rayfl.data.sources.leaf",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from algorithms.base import Algorithm as Algorithm
    from algorithms.base import Averaging as Averaging
    from algorithms.clients import Clients as Clients
    from cluster.run import run as run
    from rayfl.aggregation.exact_sum import Weighted as Weighted
    from rayfl.data.sources.leaf import import_leaf as import_leaf
    from rayfl.engine.client import Client as Client
    from rayfl.engine.server import Server as Server
    from rayfl.errors import RayflError as RayflError
    from rayfl.experiment.result import Result as Result
    from rayfl.optimization.elementwise import ElementwiseOptimizer as ElementwiseOptimizer
    from rayfl.tasks.base import NetworkTask as NetworkTask
    from rayfl.tasks.base import Predictor as Predictor
    from rayfl.tracking.callback import Callback as Callback


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rayfl' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _refuse_shadowing() -> None:
    """Three of rayfl's packages have everyday names: another one first on the path would be imported instead."""
    home = Path(__file__).resolve().parent.parent
    for name in ("actors", "algorithms", "cluster"):
        spec = find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
        if home / name not in places[:1]:
            found = places[0] if places else (spec.origin if spec else "nothing")
            raise ImportError(
                f"rayfl needs its own package {name!r} in {home}, but Python finds {found}: rename or move that one, "
                "or start from another folder"
            )


_refuse_shadowing()
renamed.install()
