"""Augmentation, private normalization and the official test part across real processes: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rayfl
from tests.support.experiments import assert_same, outcome


def experiment(folder: Path, name: str, options: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    path = folder / "images.table"
    if not path.exists():
        generator = np.random.default_rng(0)
        y = generator.integers(0, 3, 260)
        x = (generator.integers(0, 100, (260, 64)) + 70 * y[:, None]).astype(np.uint8)
        split = ["train"] * 160 + ["test"] * 100
        pq.write_table(pa.table({"x": pa.array(x.tolist(), pa.list_(pa.uint8())), "y": y, "split": split}), path)
    base = {
        "name": name,
        "storage_path": str(folder / "runs"),
        "dataset": {"name": "parquet", "path": str(path), "shape": [1, 8, 8], "part": "train", "root": str(folder)},
        "partition": {"name": "iid", "num_clients": 5},
        "model": {"name": "tests.support.own_norm:normalized", "head": "4"},
        "augment": {"crop": 1, "flip": True, "rotate": 20},
        "algorithm": {"name": "fedavg", "finetune_epochs": 1},
        "train": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "batch_size": 8, "lr": 0.1},
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": cluster,
    }
    return {**base, **{key: {**base[key], **value} for key, value in options.items()}}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("options", "actors"),
    [
        pytest.param({"evaluation": {"official_test": True}}, (1, 3), marks=pytest.mark.slow),
        pytest.param({"train": {"private_norm": "all"}}, (3,), marks=pytest.mark.slow),
    ],
    ids=["official-test", "private-norm"],
)
def test_any_number_of_actors_gives_the_same_bits(
    options: dict[str, Any], actors: tuple[int, ...], tmp_path: Path
) -> None:
    rayfl.run(experiment(tmp_path, "inline", options, backend="inline"))
    inline = outcome(tmp_path / "runs" / "inline")
    assert inline.rounds.num_rows
    for number in actors:
        rayfl.run(experiment(tmp_path, f"ray-{number}", options, num_actors=number))
        assert_same(inline, outcome(tmp_path / "runs" / f"ray-{number}"))
