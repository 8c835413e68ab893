"""What is remembered of clients' updates, and how far these are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.selection import updates as module
from rayfl.selection.updates import Metric, changes_of, distances, heard, with_updates

METRICS: tuple[Metric, ...] = ("arccos", "l2", "l1")


def vectors(seed: int, clients: list[int], size: int = 9) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {client: torch.randn(size, generator=generator) for client in clients}


def by_definition(one: Tensor, other: Tensor, metric: Metric) -> float:
    a, b = one.double().tolist(), other.double().tolist()
    if metric == "l1":
        return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True))
    if metric == "l2":
        return math.dist(a, b)
    lengths = math.hypot(*a), math.hypot(*b)
    if not min(lengths):
        return 0.0 if not max(lengths) else math.pi / 2
    cosine = math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.prod(lengths)
    return math.acos(max(-1, min(1, cosine)))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("block", [1, 1 << 23])
def test_distances_are_those_of_the_last_updates(metric: Metric, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept from round to round or computed at once, in one piece or row by row: the same bits."""
    monkeypatch.setattr(module, "_BLOCK", block)
    rounds = [vectors(0, [1, 4]), vectors(1, [4, 2]), {**vectors(2, [0]), 1: torch.zeros(9)}]
    own, last = {}, {client: torch.zeros(9) for client in range(6)}
    for sent in rounds:
        before = {key: dict(value) for key, value in own.items()}
        own, old = with_updates(own, sent, metric, 6), own
        assert all(old[key] == before[key] for key in before)
        last |= sent
    assert heard(own).tolist() == [0, 1, 2, 4]
    found = distances(own, metric, 6)
    expected = [[by_definition(last[i], last[j], metric) for j in range(6)] for i in range(6)]
    np.fill_diagonal(expected := np.array(expected), 0)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)
    assert (found == found.T).all()
    others = next(other for other in METRICS if other != metric)
    fork = {"updates": own["updates"], "distances": {others: own["distances"][metric]}}
    assert (distances(fork, metric, 6) == found).all()


def test_nobody_was_heard_of_at_first() -> None:
    assert not distances({}, "arccos", 4).any()
    assert heard({}).size == 0
    assert with_updates({}, {}, "l2", 4) == {}


def test_updates_of_another_size_are_forgotten() -> None:
    own = with_updates({}, vectors(0, [0, 1]), "l2", 3)
    renewed = with_updates(own, vectors(1, [2], size=5), "l2", 3)
    assert heard(renewed).tolist() == [2]
    assert distances(renewed, "l2", 3)[0, 1] == 0


def test_changes_are_of_parameters_in_one_order() -> None:
    received = {"b": torch.ones(2), "a": torch.zeros(1, 2), "norm.running_mean": torch.zeros(2)}
    sent = {"norm.running_mean": torch.ones(2), "b": torch.tensor([3.0, 1.0]), "a": torch.tensor([[5.0, 6.0]])}
    found = changes_of({4: sent}, received, ["norm.running_mean"])
    assert found[4].tolist() == [5.0, 6.0, 2.0, 0.0]
