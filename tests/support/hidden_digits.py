"""Scikit-learn's digits as they are, and with other labels where a run hides them, as users' data."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from algorithms.registry import Experiment
from rayfl.experiment.parts import Parts

SECTIONS: dict[str, Any] = {
    "partition": {"name": "iid", "num_clients": 5},
    "labelled": {"share": 0.3},
    "holdout": {"test": 0.2, "validation": 0.1, "public": 50},
}
"""Of the runs, whose partition does not read labels."""


def as_they_are(seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64), 10


def changed(seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Every hidden label is another one."""
    x, y, classes = as_they_are()
    y[hidden()] = (y[hidden()] + 3) % classes
    return x, y, classes


def hidden() -> np.ndarray:
    """The samples whose labels nobody may know."""
    content = {"dataset": {"name": f"{__name__}:as_they_are"}, "model": {"name": "two_nn"}, **SECTIONS}
    table = Parts(Experiment.model_validate({**content, "algorithm": {"name": "fedavg"}})).assignment.to_pandas()
    found: np.ndarray = table.loc[table["split"] == "unlabelled", "sample"].to_numpy()
    return found
