"""Primary classes per fold, and groups of classes cut into clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.data.partitions.grouped import ClassBlocksPartition, ClassGroupsPartition, PrimaryClassesPartition
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

CIFAR = np.repeat(np.arange(10), 5000)


def histogram(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=10) for part in parts])


def test_five_folds_of_cifar_are_exact() -> None:
    parts = PrimaryClassesPartition(num_clients=100).assign(CIFAR, RandomStreams(0))
    counts = histogram(CIFAR, parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    for client, row in enumerate(counts):
        own = [2 * (client % 5), 2 * (client % 5) + 1]
        assert row[own].tolist() == [200, 200]
        others = np.delete(row, own)
        assert others.sum() == 100 and set(others.tolist()) == {12, 13}
    folds = [tuple(row.argsort()[-2:]) for row in counts]
    assert all(sum(set(fold) == {2 * f, 2 * f + 1} for fold in folds) == 20 for f in range(5))


@pytest.mark.parametrize(("share", "primary", "other"), [(0.8, 210, 10), (0.7, 190, 15)])
def test_the_forms_of_public_code_include_the_primary_classes(share: float, primary: int, other: int) -> None:
    partition = PrimaryClassesPartition(num_clients=100, primary_share=share, mode="including")
    counts = histogram(CIFAR, partition.assign(CIFAR, RandomStreams(0)))
    assert {tuple(sorted(row)) for row in counts} == {(other,) * 8 + (primary,) * 2}
    assert counts.sum(0).tolist() == [5000] * 10


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 10),
    st.integers(1, 10),
    st.integers(1, 30),
    st.floats(0.05, 1),
    st.sampled_from(["including", "excluding"]),
)
def test_counts_add_up_to_the_clients_size(classes: int, folds: int, size: int, share: float, mode: str) -> None:
    folds = min(folds, classes - 1) or 1
    partition = PrimaryClassesPartition(num_clients=7, num_folds=folds, primary_share=share, mode=mode)  # type: ignore[arg-type]
    counts = partition.counts(size, classes)
    own = round(share * size)
    assert (counts >= 0).all()
    if folds > 1 or mode == "including":
        assert counts.sum(1).tolist() == [size] * 7
        assert counts.sum() >= 7 * own


def test_unbalanced_data_are_refused_with_numbers() -> None:
    labels = np.concatenate([np.zeros(90, dtype=np.int64), np.arange(1, 5).repeat(10)])
    with pytest.raises(DataError, match=r"class 1 has 10 samples where \d+ are needed"):
        PrimaryClassesPartition(num_clients=5).assign(labels, RandomStreams(0))
    with pytest.raises(DataError, match="only 5 classes"):
        PrimaryClassesPartition(num_clients=5, num_folds=6).assign(labels, RandomStreams(0))
    with pytest.raises(DataError, match="no other classes for 20% of the samples, which would go to nobody"):
        PrimaryClassesPartition(num_clients=5, num_folds=1).assign(labels, RandomStreams(0))
    parts = PrimaryClassesPartition(num_clients=5, num_folds=1, primary_share=1).assign(
        np.arange(50) % 5, RandomStreams(0)
    )
    assert [len(part) for part in parts] == [10] * 5


def test_emnist_by_class_gives_about_the_papers_clients() -> None:
    """The paper reports 1,543 clients of 452 +- 203 samples; five equal pools of 697,932 predict 1,550 +- 15."""
    labels = np.arange(697_932) % 62
    partition = ClassGroupsPartition(num_groups=5, kinds=(10, 26, 26), min_size=100, max_size=800)
    parts = partition.assign(labels, RandomStreams(0))
    sizes = np.array([len(part) for part in parts])
    assert abs(len(parts) - 1543) <= 40
    assert 440 <= sizes.mean() <= 460
    assert 195 <= sizes.std() <= 210
    assert sizes.min() >= 100 and sizes.max() <= 800
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined) > 697_932 - 5 * 800
    kinds = [np.unique(labels[part]) for part in parts]
    assert all(sum(k < 10) == 2 and 5 <= sum((k >= 10) & (k < 36)) <= 6 and 5 <= sum(k >= 36) <= 6 for k in kinds)
    assert len({tuple(k) for k in kinds}) == 5


def test_tiny_imagenet_gives_about_the_papers_clients() -> None:
    """The paper reports 390 clients of 252 +- 88 samples."""
    labels = np.repeat(np.arange(200), 500)
    parts = ClassGroupsPartition(num_groups=10, min_size=100, max_size=400).assign(labels, RandomStreams(0))
    sizes = np.array([len(part) for part in parts])
    assert abs(len(parts) - 390) <= 20
    assert 240 <= sizes.mean() <= 260
    assert all(18 <= len(np.unique(labels[part])) <= 20 for part in parts)


def test_groups_that_do_not_fit_are_refused() -> None:
    labels = np.repeat(np.arange(4), 10)
    with pytest.raises(DataError, match=r"add up to 5, but there are 4 classes"):
        ClassGroupsPartition(num_groups=2, kinds=(2, 3), min_size=1).assign(labels, RandomStreams(0))
    with pytest.raises(DataError, match="no group has enough samples"):
        ClassGroupsPartition(num_groups=2).assign(labels, RandomStreams(0))
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        ClassGroupsPartition(kinds=(9, -5))
    with pytest.raises(ValidationError, match="must not exceed"):
        ClassGroupsPartition(min_size=5, max_size=4)


@pytest.mark.parametrize("sizes", ["unbalanced", "balanced"])
@pytest.mark.parametrize(("num_classes", "wide", "group"), [(10, 2, 4), (100, 10, 2), (200, 20, 2)])
def test_blocks_of_classes_are_those_of_pfllib(num_classes: int, wide: int, group: int, sizes: Any) -> None:
    """Twenty clients; groups of ``group`` neighbours share ``wide`` consecutive classes that nobody else has."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), 600))
    partition = ClassBlocksPartition(num_clients=20, classes_per_client=wide, sizes=sizes)
    parts = partition.assign(labels, RandomStreams(1))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for client, part in enumerate(parts):
        block = client // group
        assert np.unique(labels[part]).tolist() == list(range(wide * block, wide * (block + 1)))
    counts = np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])
    equal = 600 / group
    others = counts[np.arange(20) % group < group - 1]
    if sizes == "balanced":
        assert set(counts[counts > 0].tolist()) == {int(equal)}
        return
    drawn = others[others > 0]
    assert max(1, int(max(equal / 10, 40 / num_classes))) <= drawn.min() < drawn.max() <= int(equal) - 1
    assert len(np.unique(drawn)) > 10
    last = counts[group - 1 :: group]
    assert last.sum() > others.reshape(20 // group, group - 1, -1).sum((1, 2)).mean() / (group - 1)


def test_blocks_of_classes_take_samples_in_their_order() -> None:
    labels = np.tile([0, 1], 50)
    one, other = ClassBlocksPartition(num_clients=2, classes_per_client=2, min_samples=4).assign(
        labels, RandomStreams(0)
    )
    for label in (0, 1):
        assert one[labels[one] == label].max() < other[labels[other] == label].min()


@pytest.mark.parametrize(
    ("clients", "wide", "per_class", "message"),
    [
        (11, 1, 600, "do not hold the data's 10 classes"),
        (20, 11, 600, "do not hold the data's 10 classes"),
        (20, 2, 3, "class 0 has 3 samples for the 4 clients"),
        (20, 2, 16, "class 0 has 16 samples for the 4 clients"),
    ],
)
def test_blocks_of_classes_that_cannot_be_dealt_are_refused(
    clients: int, wide: int, per_class: int, message: str
) -> None:
    partition = ClassBlocksPartition(num_clients=clients, classes_per_client=wide)
    with pytest.raises(DataError, match=message):
        partition.assign(np.repeat(np.arange(10), per_class), RandomStreams(0))
