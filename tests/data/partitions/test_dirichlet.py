"""Dirichlet partitions: nothing lost, nothing twice, and the statistics their definitions imply."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.partitions import dirichlet
from rayfl.data.partitions.dirichlet import DirichletEqualPartition, DirichletPartition, LabelAndSizePartition
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

CIFAR = np.repeat(np.arange(10), 5000)
ALPHA = st.floats(0.01, 1000)


def histogram(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=int(labels.max()) + 1) for part in parts])


def check(labels: np.ndarray, parts: list[np.ndarray], clients: int) -> None:
    assert len(parts) == clients
    joined = np.concatenate(parts)
    assert np.array_equal(np.sort(joined), np.arange(len(labels)))
    for part in parts:
        assert part.dtype == np.int64 and len(part) and (np.diff(part) > 0).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=30, max_size=200), st.integers(1, 8), ALPHA, st.integers(0, 9))
def test_nothing_is_lost_or_twice_and_seeds_reproduce(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    array, streams = np.array(labels), RandomStreams(seed)
    for partition in (
        DirichletPartition(num_clients=clients, alpha=max(alpha, 0.3)),
        DirichletPartition(num_clients=clients, alpha=max(alpha, 1.0), cap=False, size_alpha=10),
        DirichletEqualPartition(num_clients=clients, alpha=alpha),
        LabelAndSizePartition(num_clients=clients, alpha_label=alpha, alpha_size=10),
    ):
        try:
            parts = partition.assign(array, streams)
        except DataError:
            assert isinstance(partition, DirichletPartition)  # tiny classes: somebody stays empty in every draw
            continue
        check(array, parts, clients)
        again = partition.assign(array, RandomStreams(seed))
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_large_concentrations_divide_every_class_evenly() -> None:
    parts = DirichletPartition(num_clients=20, alpha=1e9).assign(CIFAR, RandomStreams(0))
    assert np.abs(histogram(CIFAR, parts) - 250).max() <= 1


def test_small_concentrations_give_a_class_to_few_clients() -> None:
    parts = DirichletPartition(num_clients=20, alpha=0.01, cap=False, min_samples=1, small_clients="drop").assign(
        CIFAR, RandomStreams(0)
    )
    assert (histogram(CIFAR, parts) > 100).sum() < 25


def test_the_cap_keeps_sizes_in_bounds() -> None:
    capped = DirichletPartition(num_clients=20, alpha=0.5).assign(CIFAR, RandomStreams(1))
    free = DirichletPartition(num_clients=20, alpha=0.5, cap=False).assign(CIFAR, RandomStreams(1))
    assert np.std([len(p) for p in capped]) < np.std([len(p) for p in free])


def test_small_clients_are_redrawn_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirichlet, "_MOST_DRAWS", 100)
    labels = CIFAR[::100]
    settings_ = {"num_clients": 40, "alpha": 0.05, "cap": False}
    dropped = DirichletPartition(**settings_, min_samples=11, small_clients="drop").assign(labels, RandomStreams(0))
    assert 0 < len(dropped) < 40
    assert min(map(len, dropped)) >= 11
    with pytest.raises(
        DataError, match=r"min_samples is 501, but none of 40 clients has as many, the largest \d+: lower"
    ):
        DirichletPartition(**settings_, min_samples=501, small_clients="drop").assign(labels, RandomStreams(0))
    with pytest.raises(DataError, match=r"partition.alpha is 0.05: in 100 draws some client had fewer than 11"):
        DirichletPartition(**settings_, min_samples=11).assign(labels, RandomStreams(0))
    with pytest.raises(DataError, match=r"raise partition.size_alpha or partition.alpha, lower partition.num_clients"):
        DirichletPartition(num_clients=40, alpha=9, cap=False, size_alpha=0.01).assign(labels, RandomStreams(0))
    redrawn = DirichletPartition(num_clients=10, alpha=0.5, cap=False, min_samples=10).assign(labels, RandomStreams(0))
    assert min(map(len, redrawn)) >= 10


def test_size_factors_are_redrawn_with_the_proportions() -> None:
    """With even proportions sizes are N times the factors: kept ones that are too small would fail every draw."""
    labels = CIFAR[::100]
    settings_ = {"num_clients": 4, "alpha": 1e9, "cap": False, "size_alpha": 1.0}
    least = []
    for seed in range(30):
        parts = DirichletPartition(**settings_, min_samples=25).assign(labels, RandomStreams(seed))
        check(labels, parts, 4)
        least.append(min(map(len, parts)))
        first = DirichletPartition(**settings_, small_clients="drop").assign(labels, RandomStreams(seed))
        if len(first) == 4 and min(map(len, first)) >= 25:
            assert all(map(np.array_equal, parts, first))  # what succeeds at once is one and the same draw
    # Of flat proportions given that each is above 1/20 the least is on average 1/20 + (1 - 4/20) / 4^2 = 1/10.
    assert min(least) >= 25 and abs(np.mean(least) / 500 - 0.1) < 0.03


def test_equal_sizes_are_exact_for_cifar() -> None:
    parts = DirichletEqualPartition(num_clients=100, alpha=0.5).assign(CIFAR, RandomStreams(0))
    check(CIFAR, parts, 100)
    counts = histogram(CIFAR, parts)
    assert (counts.sum(1) == 500).all()
    # For Dir(0.5) over ten classes E[max] is about 0.4; uniform clients would have 0.1.
    assert 0.3 < (counts.max(1) / 500).mean() < 0.6


def test_label_and_size_has_the_spread_of_its_size_distribution() -> None:
    """The standard deviation of 49,000 Dir(10 1_20) is 742 on average."""
    labels = CIFAR[:-1000]
    deviations = []
    for seed in range(12):
        parts = LabelAndSizePartition(num_clients=20).assign(labels, RandomStreams(seed))
        deviations.append(np.std([len(part) for part in parts]))
    assert 600 < np.mean(deviations) < 900
    even = LabelAndSizePartition(num_clients=20, alpha_size=1e9, alpha_label=1e9).assign(labels, RandomStreams(0))
    assert np.ptp([len(part) for part in even]) <= 2


@pytest.mark.parametrize("cap", [True, False])
def test_fedmas_form_without_cap_has_the_predicted_sizes(cap: bool) -> None:
    """Sizes of per-class Dir(0.5 1_20) on 49,000 samples: standard deviation 995 +- 158 over draws."""
    labels = CIFAR[:-1000]
    spread = [
        np.std(
            [len(p) for p in DirichletPartition(num_clients=20, alpha=0.5, cap=cap).assign(labels, RandomStreams(s))]
        )
        for s in range(12)
    ]
    assert (850 < np.mean(spread) < 1150) == (not cap)


@pytest.mark.parametrize("cap", [True, False])
def test_of_few_classes_each_is_cut_by_a_dirichlet_distribution_over_its_clients(cap: bool) -> None:
    """Extended Dirichlet: 20 clients with 3 of 10 classes each, so that 6 clients hold a class."""
    settings_ = {"num_clients": 20, "classes_per_client": 3, "cap": cap}
    even = histogram(CIFAR, DirichletPartition(**settings_, alpha=1e9).assign(CIFAR, RandomStreams(0)))
    assert ((even > 0).sum(0) == 6).all()
    assert (even > 0).sum(1).max() == 3
    if not cap:
        assert np.abs(even[even > 0] - 5000 / 6).max() <= 1
    skewed = DirichletPartition(**settings_, alpha=0.5).assign(CIFAR, RandomStreams(0))
    check(CIFAR, skewed, 20)
    counts = histogram(CIFAR, skewed)
    assert (counts > 0).sum(1).max() <= 3
    assert counts.max() > 1500  # E[max] of Dir(0.5) over six is about half a class


def test_the_proportions_of_few_classes_have_the_moments_of_their_distribution() -> None:
    """A share of a class of Dir(alpha 1_6) has mean 1/6 and variance 5 / 36 / (6 alpha + 1)."""
    partition = DirichletPartition(num_clients=20, classes_per_client=3, alpha=2.0, cap=False)
    shares = []
    for seed in range(60):
        counts = histogram(CIFAR, partition.assign(CIFAR, RandomStreams(seed)))
        shares.append(np.sort(counts / 5000, axis=0)[-6:])  # a client of a class has some sample, but for chance
    values = np.concatenate(shares).ravel()
    assert values.mean() == pytest.approx(1 / 6)
    assert values.var() == pytest.approx(5 / 36 / 13, rel=0.1)


def test_with_more_or_too_few_classes_than_there_are_the_field_is_named() -> None:
    with pytest.raises(DataError, match="classes_per_client is 11, but the data have only 10"):
        DirichletPartition(num_clients=20, classes_per_client=11, alpha=1).assign(CIFAR, RandomStreams(0))
    with pytest.raises(DataError, match="some of the 10 classes would go to nobody; at least 5 clients"):
        DirichletPartition(num_clients=4, classes_per_client=2, alpha=1).assign(CIFAR, RandomStreams(0))
