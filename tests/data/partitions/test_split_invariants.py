"""Invariants SPLIT that every partition has, whatever its rule."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from rayfl.data.partitions.registry import Partition
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
