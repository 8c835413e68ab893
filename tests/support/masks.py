"""Samples with masks, and sections of a run that learns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from rayfl.metrics.language import IGNORED

SHAPES = {"flat": (7, 8), "solid": (4, 5, 6)}
CLIENTS = np.repeat(["north", "south", "west"], 10)


def made(shape: str, change: Callable[[np.ndarray], Any] = lambda y: y, clients: bool = True) -> Any:
    sides = SHAPES[shape]
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, (30, *sides)).astype(np.uint8)
    x = (y[:, None] + generator.normal(size=(30, 1, *sides))).astype(np.float32)
    return (x, change(y), 3, CLIENTS) if clients else (x, change(y), 3)


def flat(seed: int) -> Any:
    return made("flat")


def solid(seed: int) -> Any:
    return made("solid", lambda y: np.where(y == 2, IGNORED, y.astype(np.int16)))


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "task": "segmentation",
        "dataset": f"{__name__}:flat",
        "partition": "natural",
        "holdout": {"test": 0.3},
        "model": {"name": "unet", "width": 2, "depth": 1},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 2, "local_epochs": 1, "batch_size": 4, "lr": 0.1},
        "cluster": {"backend": "inline"},
        **changes,
    }


def parts(**changes: Any) -> Parts:
    return Parts(load_config(Experiment, sections(**changes), {}))
