"""Users' own data: files, and functions that return what a test has put there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts

HERE = __name__
N = 40
RANDOM = np.random.default_rng(0)
MADE: dict[str, Any] = {}
"""What :func:`made` returns, by the name of a test's case."""


def made(seed: int) -> Any:
    return MADE["data"]


def table(path: Path, **columns: Any) -> Path:
    content = {"x": RANDOM.normal(size=(N, 3)).tolist(), "y": [0, 1, 2, 3] * 10} | columns
    pq.write_table(pa.table({name: column for name, column in content.items() if column is not None}), path)
    return path


def parts(dataset: dict[str, Any], **sections: Any) -> Parts:
    base = {
        "model": "two_nn",
        "algorithm": "fedavg",
        "partition": {"name": "iid", "num_clients": 4},
        "train": {"clients_per_round": "all"},
    }
    return Parts(load_config(Experiment, {**base, "dataset": dataset, **sections}, []))


def remarks(dataset: dict[str, Any], caplog: pytest.LogCaptureFixture, **sections: Any) -> list[str]:
    """What a run with these data warns of before it starts."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rayfl"):
        parts(dataset, **sections).check()
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("dataset: ")]


def of_file(path: Path, **options: Any) -> dict[str, Any]:
    return {"name": "parquet", "path": str(path), **options}


def of_function(*data: Any, **options: Any) -> dict[str, Any]:
    MADE["data"] = data
    return {"name": "custom", "function": f"{HERE}:made", **options}


X = RANDOM.normal(size=(N, 3))
ONE_TWO, GAP = [1, 2] * 20, [0, 5] * 20
