"""Partitions: the split invariants for any labels, and the papers' own splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rayfl.data.partitions.base import (
    ClassesPartition,
    IIDPartition,
    NaturalPartition,
    PathologicalPartition,
)
from rayfl.data.partitions.registry import Partition
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

MNIST_CLASS_SIZES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
STREAMS = RandomStreams(3)

label_arrays = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(lambda values: np.array(values, np.int64))


def balanced(num_classes: int, per_class: int) -> np.ndarray:
    """Labels in an order that is not sorted."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), per_class))


def check_invariants(partition: Partition, labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """INV-SPLIT-1, 2 and 4 and the requested number of clients, for partitions that lose no sample."""
    parts = partition.assign(labels, RandomStreams(seed))
    again = partition.assign(labels, RandomStreams(seed))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
    assert all(part.dtype == np.int64 and len(part) and (np.diff(part) > 0).all() for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    return parts


def class_counts(labels: np.ndarray, parts: list[np.ndarray]) -> list[dict[int, int]]:
    return [
        dict(zip(*(a.tolist() for a in np.unique(labels[part], return_counts=True)), strict=True)) for part in parts
    ]


@given(label_arrays, st.integers(1, 20), st.integers(1, 4), st.sampled_from(["random", "cyclic"]), st.integers(0, 9))
def test_pathological_invariants(labels, num_clients, shards, assignment, seed):
    assume(num_clients * shards <= len(labels))
    partition = PathologicalPartition(num_clients=num_clients, shards_per_client=shards, assignment=assignment)
    parts = check_invariants(partition, labels, seed)
    sizes = {len(part) for part in parts}
    assert len(parts) == num_clients
    assert max(sizes) - min(sizes) <= shards
    if len(labels) % (num_clients * shards) == 0:
        assert sizes == {len(labels) // num_clients}


@given(label_arrays, st.integers(1, 20), st.integers(0, 9))
def test_iid_invariants(labels, num_clients, seed):
    assume(num_clients <= len(labels))
    parts = check_invariants(IIDPartition(num_clients=num_clients), labels, seed)
    sizes = [len(part) for part in parts]
    assert len(parts) == num_clients
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 15), st.integers(0, 9))
def test_classes_invariants(num_classes, classes_per_client, num_clients, seed):
    assume(classes_per_client <= num_classes <= num_clients * classes_per_client)
    labels = balanced(num_classes, 16)
    partition = ClassesPartition(num_clients=num_clients, classes_per_client=classes_per_client)
    parts = check_invariants(partition, labels, seed)
    counts = class_counts(labels, parts)
    assert [len(held) for held in counts] == [classes_per_client] * num_clients
    for label in range(num_classes):
        chunks = [held[label] for held in counts if label in held]
        assert max(chunks) - min(chunks) <= 1


@pytest.mark.parametrize("num_clients", [50, 100])
def test_cyclic_shards_of_ten_balanced_classes_give_five_pairs(num_clients):
    labels = balanced(10, 5000)
    partition = PathologicalPartition(num_clients=num_clients, assignment="cyclic")
    parts = check_invariants(partition, labels, 0)
    counts = class_counts(labels, parts)
    size = 50_000 // num_clients
    assert all(list(held.values()) == [size // 2, size // 2] for held in counts)
    assert [set(held) for held in counts] == [
        {5 * i // num_clients, 5 * i // num_clients + 5} for i in range(num_clients)
    ]
    assert len({tuple(held) for held in counts}) == 5
    expected = {50: {0: {0, 5}, 49: {4, 9}}, 100: {20: {1, 6}}}[num_clients]
    assert {client: set(counts[client]) for client in expected} == expected


def test_cyclic_shards_ignore_the_seed_and_random_ones_do_not():
    labels = balanced(10, 40)
    for assignment, same in (("cyclic", True), ("random", False)):
        partition = PathologicalPartition(num_clients=20, assignment=assignment)
        one, other = (np.concatenate(partition.assign(labels, RandomStreams(seed))) for seed in (0, 1))
        assert np.array_equal(one, other) is same


def test_shards_keep_the_order_of_the_samples_within_a_class():
    parts = PathologicalPartition(num_clients=2, shards_per_client=1, assignment="cyclic").assign(
        np.array([1, 0, 1, 0]), STREAMS
    )
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2]]
    labels = balanced(10, 40)
    parts = PathologicalPartition(num_clients=40, shards_per_client=1, assignment="cyclic").assign(labels, STREAMS)
    assert np.concatenate(parts).tolist() == sorted(range(400), key=labels.tolist().__getitem__)


def test_mnist_shards_of_a_client_have_at_most_four_classes():
    labels = np.repeat(np.arange(10), MNIST_CLASS_SIZES)
    for assignment in ("random", "cyclic"):
        parts = PathologicalPartition(num_clients=100, assignment=assignment).assign(labels, STREAMS)
        assert {len(part) for part in parts} == {600}
        assert max(len(held) for held in class_counts(labels, parts)) <= 4


@pytest.mark.parametrize(
    ("num_classes", "num_clients", "classes_per_client", "chunk"),
    [(10, 100, 5, 100), (100, 100, 20, 25), (100, 20, 5, 500)],
)
def test_classes_reproduce_the_splits_of_fedphp(num_classes, num_clients, classes_per_client, chunk):
    labels = balanced(num_classes, 50_000 // num_classes)
    partition = ClassesPartition(num_clients=num_clients, classes_per_client=classes_per_client)
    counts = class_counts(labels, check_invariants(partition, labels, 1))
    assert all(list(held.values()) == [chunk] * classes_per_client for held in counts)
    block = num_classes // classes_per_client
    for start in range(0, num_clients, block):
        assert sorted(label for held in counts[start : start + block] for label in held) == list(range(num_classes))


def test_a_client_between_two_shuffles_holds_distinct_classes_even_when_chance_forbids_it():
    # A blind shuffle of 300 classes has a chance of 1e-27 to fit the second client.
    labels = balanced(300, 4)
    parts = check_invariants(ClassesPartition(num_clients=4, classes_per_client=220), labels, 0)
    assert [len(held) for held in class_counts(labels, parts)] == [220] * 4


def test_classes_need_not_be_numbered_from_zero():
    labels = np.array([7, 7, 9, 9, 30, 30])
    counts = class_counts(labels, ClassesPartition(num_clients=3, classes_per_client=1).assign(labels, STREAMS))
    assert sorted(label for held in counts for label in held) == [7, 9, 30]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (IIDPartition(num_clients=41), r"num_clients is 41, .* 40 samples"),
        (PathologicalPartition(num_clients=41), r"num_clients is 41, .* 40 samples"),
        (PathologicalPartition(num_clients=21), r"num_clients \(21\) .* 42 shards, more than the 40 samples"),
        (ClassesPartition(num_clients=41, classes_per_client=1), r"num_clients is 41, .* 40 samples"),
        (ClassesPartition(num_clients=3, classes_per_client=3), r"at least 4 clients are needed"),
        (ClassesPartition(num_clients=3, classes_per_client=11), r"classes_per_client is 11, .* only 10 classes"),
        (
            ClassesPartition(num_clients=30, classes_per_client=2),
            r"num_clients is 30: class \d has 4 samples for the 6",
        ),
        (NaturalPartition(), r"'natural'.*choose another partition"),
    ],
)
def test_impossible_partitions_name_the_field(partition, message):
    with pytest.raises(DataError, match=message):
        partition.assign(balanced(10, 4), STREAMS)


@pytest.mark.parametrize(
    "partition",
    [
        PathologicalPartition(num_clients=3),
        ClassesPartition(num_clients=3, classes_per_client=2),
        IIDPartition(num_clients=3),
        NaturalPartition(),
    ],
)
def test_partitions_are_told_apart_by_name(partition):
    adapter = TypeAdapter(Partition)
    assert adapter.validate_python(partition.model_dump()) == partition
    with pytest.raises(ValidationError, match="extra"):
        adapter.validate_python({**partition.model_dump(), "typo": 1})
    for field in type(partition).model_fields.values():
        assert field.description


@settings(max_examples=10)
@given(st.integers(max_value=0))
def test_counts_below_one_are_refused(count):
    for fields in ({"num_clients": count}, {"num_clients": 1, "shards_per_client": count}):
        with pytest.raises(ValidationError):
            PathologicalPartition(**fields)
