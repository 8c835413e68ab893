"""Invariants SPLIT that every partition has, whatever its rule."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from rayfl.data.partitions.base import PathologicalPartition
from rayfl.data.partitions.registry import Partition
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

OPTIONS: dict[str, dict[str, Any]] = {
    "pathological": {"num_clients": 6},
    "classes": {"num_clients": 6, "classes_per_client": 2},
    "class_blocks": {"num_clients": 6, "classes_per_client": 2, "min_samples": 6},
    "iid": {"num_clients": 6},
    "dirichlet": {"num_clients": 6, "alpha": 1.0},
    "dirichlet_equal": {"num_clients": 6, "alpha": 0.5},
    "label_and_size": {"num_clients": 6, "alpha_label": 0.5, "alpha_size": 5.0},
    "primary_classes": {"num_clients": 6, "num_folds": 3, "primary_share": 0.5},
    "class_groups": {"num_groups": 2, "kinds": (2, 4), "min_size": 10, "max_size": 40},
    "domains": {"clients_per_domain": 2, "samples_per_client": 20},
}
GIVEN_BY_OTHERS = {"natural", "file", "flower"}
"""Clients are those of the data, of a file, or of another library's partitioner."""


SKEWED = [name for name in OPTIONS if name not in {"iid", "primary_classes", "class_groups", "domains"}]


def labels() -> np.ndarray:
    """Six classes, the last one a little larger, in no order."""
    return np.random.default_rng(1).permutation(np.repeat(np.arange(6), [72, 72, 72, 72, 72, 75]))


def test_every_partition_is_tried() -> None:
    names = {member.model_fields["name"].default for member in get_args(get_args(Partition)[0])}
    assert names == set(OPTIONS) | GIVEN_BY_OTHERS


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_clients_are_disjoint_sorted_and_drawn_from_the_seed_alone(name: str, seed: int) -> None:
    partition: Any = TypeAdapter(Partition).validate_python({"name": name, **OPTIONS[name]})
    data = labels()
    parts = partition.assign(data, RandomStreams(seed))
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)  # SPLIT-1, and 2: no sample twice in one client either
    assert joined.min() >= 0 and joined.max() < len(data)  # SPLIT-2
    assert all(part.dtype == np.int64 and len(part) and (np.diff(part) > 0).all() for part in parts)
    again = partition.assign(data.copy(), RandomStreams(seed))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))  # SPLIT-4


@pytest.mark.parametrize("name", SKEWED)
def test_a_share_of_the_samples_may_be_dealt_evenly(name: str) -> None:
    def assigned(share: float) -> list[np.ndarray]:
        made = {"name": name, **OPTIONS[name], "iid_share": share}
        partition: Any = TypeAdapter(Partition).validate_python(made)
        return partition.assign(labels(), RandomStreams(3))

    count = len(labels())
    parts, even = assigned(0.5), RandomStreams(3).generator("split.iid").permutation(count)[: round(count / 2)]
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    hands = [np.isin(part, even).sum() for part in parts]
    assert sum(hands) == len(even)
    assert max(hands) - min(hands) <= 1
    assert any(np.isin(part, even, invert=True).any() for part in parts)
    dealt = assigned(1.0)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(count))
    assert np.ptp([len(part) for part in dealt]) <= 1


def test_similarity_of_clients_is_that_of_scaffold() -> None:
    """s of a client's samples are drawn evenly, the others are consecutive ones of the list sorted by label."""
    labels = np.repeat(np.arange(10), 100)
    for share, least in ((None, 90), (0.1, 80), (0.5, 50)):
        parts = PathologicalPartition(num_clients=10, shards_per_client=1, iid_share=share).assign(
            labels, RandomStreams(0)
        )
        largest = [np.bincount(labels[part]).max() for part in parts]
        assert [len(part) for part in parts] == [100] * 10
        assert np.mean(largest) >= least
        assert np.mean(largest) == pytest.approx(100 - 90 * (share or 0.0), abs=6)
    with pytest.raises(DataError, match=r"iid_share is 0.995: the 5 samples that it leaves are fewer than the 10"):
        PathologicalPartition(num_clients=10, iid_share=0.995).assign(labels, RandomStreams(0))
