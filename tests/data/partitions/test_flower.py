"""Splits by partitioners of Flower Datasets are what that library makes of the same rows."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from rayfl.data.partitions.flower import FlowerPartition
from rayfl.data.partitions.registry import Partition
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

LABELS = np.random.default_rng(0).integers(0, 5, 300)
DISTRIBUTION = np.random.default_rng(1).dirichlet(np.ones(4), size=5).tolist()
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "iid": ("IidPartitioner", {"num_partitions": 7}),
    "dirichlet": ("DirichletPartitioner", {"num_partitions": 6, "alpha": 0.5, "min_partition_size": 5}),
    "dirichlet-seed": (
        "DirichletPartitioner",
        {"num_partitions": 4, "alpha": [0.1, 0.5, 1, 2], "seed": 7, "self_balancing": True},
    ),
    "inner": ("InnerDirichletPartitioner", {"partition_sizes": [100, 120, 80], "alpha": 0.3}),
    "pathological": ("PathologicalPartitioner", {"num_partitions": 6, "num_classes_per_partition": 2}),
    "shards": ("ShardPartitioner", {"num_partitions": 10, "num_shards_per_partition": 2}),
    "sizes": ("SizePartitioner", {"partition_sizes": [100, 50, 150]}),
    "linear": ("LinearPartitioner", {"num_partitions": 6}),
    "square": ("SquarePartitioner", {"num_partitions": 5}),
    "exponential": ("ExponentialPartitioner", {"num_partitions": 4}),
    "distribution": (
        "DistributionPartitioner",
        {
            "distribution_array": DISTRIBUTION,
            "num_partitions": 10,
            "num_unique_labels_per_partition": 2,
            "preassigned_num_samples_per_label": 2,
        },
    ),
    "continuous": ("ContinuousPartitioner", {"num_partitions": 5, "strictness": 0.5}),
}


def parts(partitioner: str, options: dict[str, Any], seed: int = 0) -> list[np.ndarray]:
    made = TypeAdapter(Partition).validate_python({"name": "flower", "partitioner": partitioner, "options": options})
    found: list[np.ndarray] = made.assign(LABELS, RandomStreams(seed))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_client_has_the_samples_that_it_has_there(case: str) -> None:
    library = pytest.importorskip("flwr_datasets.partitioner", reason="needs the extra flwr-datasets")
    import datasets

    name, options = CASES[case]
    named = "partition_by" in library.__dict__[name].__init__.__annotations__
    arrays = {key: np.array(value) for key, value in options.items() if key == "distribution_array"}
    theirs = getattr(library, name)(**{**options, **arrays}, **({"partition_by": "digit"} if named else {}))
    pictures = np.random.default_rng(2).normal(size=300)
    theirs.dataset = datasets.Dataset.from_dict({"picture": pictures, "digit": LABELS})
    found = parts(name, options)
    assert len(found) == theirs.num_partitions
    for client, part in enumerate(found):
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()
        assert sorted(theirs.load_partition(client)["picture"]) == sorted(pictures[part])
    again = parts(name, {**options, "partition_by": "digit"} if named else options, seed=3)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("DirichletPartitioner", {"num_partitions": 4}, r"DirichletPartitioner .* refuses .*TypeError: .*'alpha'"),
        ("IidPartitioner", {"num_partitions": 0}, r"IidPartitioner of flwr-datasets refuses .*ValueError"),
        ("IidPartitioner", {"num_partitions": 301}, r"leaves client 300 of 301 without samples|refuses"),
    ],
)
def test_options_that_it_does_not_take(name: str, options: dict[str, Any], words: str) -> None:
    pytest.importorskip("flwr_datasets", reason="needs the extra flwr-datasets")
    with pytest.raises(DataError, match=words):
        parts(name, options)


def test_what_is_refused_before_the_library_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"options.seed is null, so every process would draw another split"):
        FlowerPartition(partitioner="DirichletPartitioner", options={"seed": None})
    with pytest.raises(ValidationError, match=r"Input should be .*'DirichletPartitioner'"):
        parts("NaturalIdPartitioner", {})
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(DataError, match=r"needs the package flwr-datasets .*pip install 'rayfl\[flwr-datasets\]'"):
        parts("IidPartitioner", {"num_partitions": 2})


def test_data_without_classes_are_divided_where_labels_are_not_read() -> None:
    made = [FlowerPartition(partitioner=CASES[case][0]).reads for case in ("iid", "continuous", "dirichlet")]  # type: ignore[arg-type]
    assert made == ["nothing", "order", "classes"]
