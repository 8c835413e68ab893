"""Clustered sampling: distributions of the paper's definition, whose draws are unbiased."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.params import Tree
from rayfl.selection.clustered import Clustered
from rayfl.selection.known import Known
from rayfl.selection.updates import Metric, with_updates

CASES = [Clustered(), Clustered(by="updates"), Clustered(by="updates", similarity="l2")]


def known(samples: list[int], size: int, own: Tree | None = None, seed: int = 0) -> Known:
    generator = np.random.Generator(np.random.Philox(seed))
    return replace(Known.before(samples), size=size, own=own or {}, generator=generator)


def heard_of(vectors: dict[int, list[float]], metric: Metric, clients: int) -> Tree:
    updates = {client: torch.tensor(vector) for client, vector in vectors.items()}
    return with_updates({}, updates, metric, clients)


def random_updates(clients: int, seed: int, metric: Metric = "arccos", heard: int | None = None) -> Tree:
    source = np.random.Generator(np.random.Philox(seed))
    chosen = source.choice(clients, clients if heard is None else heard, replace=False)
    return heard_of({int(c): source.normal(size=4).astype(np.float32).tolist() for c in chosen}, metric, clients)


def expected_weights(table: np.ndarray) -> list[Fraction]:
    """The expected weight of each client in the plain mean of m draws, by enumeration of all outcomes."""
    rows = [[(i, Fraction(int(mass), int(row.sum()))) for i, mass in enumerate(row) if mass] for row in table]
    found = [Fraction(0)] * table.shape[1]
    for outcome in itertools.product(*rows):
        probability = math.prod((p for _, p in outcome), start=Fraction(1))
        for client, _ in outcome:
            found[client] += probability / len(table)
    return found


@pytest.mark.parametrize("strategy", CASES, ids=["size", "arccos", "l2"])
@pytest.mark.parametrize("samples", [[7, 3, 5, 1, 4], [30, 1, 2, 3, 1], [2, 2, 2, 2, 2], [9, 9, 1, 1, 1]])
def test_the_expected_weight_of_a_client_is_its_share_of_samples(strategy: Clustered, samples: list[int]) -> None:
    own = random_updates(5, 3, strategy.similarity)
    table = strategy.distributions(known(samples, 3, own))
    assert expected_weights(table) == [Fraction(n, sum(samples)) for n in samples]


@pytest.mark.parametrize("strategy", CASES, ids=["size", "arccos", "l2"])
@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.integers(1, 90), min_size=2, max_size=14),
    share=st.floats(0, 1),
    heard=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_distributions_sum_to_one_and_clients_to_their_shares(
    strategy: Clustered, samples: list[int], share: float, heard: float, seed: int
) -> None:
    count, clients = 1 + int(share * (len(samples) - 1)), len(samples)
    own = random_updates(clients, seed, strategy.similarity, int(heard * clients))
    state = known(samples, count, own, seed)
    table = strategy.distributions(state)
    assert table.dtype == np.int64
    assert (table >= 0).all()
    assert table.sum(axis=1).tolist() == [sum(samples)] * count
    assert table.sum(axis=0).tolist() == [count * n for n in samples]
    drawn = strategy.choose(state)
    assert len(drawn) == count
    assert all(table[row, client] for row, client in enumerate(drawn))


def test_algorithm_1_fills_distributions_with_the_largest_clients_first() -> None:
    """By hand: M = 10, m n_i = 12, 9, 6, 3 in the order of sizes; the first has a distribution to itself."""
    found = Clustered().distributions(known([3, 4, 1, 2], 3))
    assert found.tolist() == [[0, 10, 0, 0], [8, 2, 0, 0], [1, 0, 3, 6]]


def ward_by_definition(points: np.ndarray, masses: list[int], capacity: int) -> set[frozenset[int]]:
    """Groups of Ward's method: those two are joined whose union has the least more within-group variance."""
    nodes: list[tuple[frozenset[int], tuple[int, int] | None]] = [(frozenset([i]), None) for i in range(len(points))]
    roots = list(range(len(points)))

    def spread(group: frozenset[int]) -> float:
        rows = points[sorted(group)]
        return float(((rows - rows.mean(axis=0)) ** 2).sum())

    def more(pair: tuple[int, int]) -> float:
        one, other = nodes[pair[0]][0], nodes[pair[1]][0]
        return spread(one | other) - spread(one) - spread(other)

    while len(roots) > 1:
        pair = min(itertools.combinations(roots, 2), key=more)
        nodes.append((nodes[pair[0]][0] | nodes[pair[1]][0], pair))
        roots = [root for root in roots if root not in pair] + [len(nodes) - 1]
    found, left = set(), roots
    while left:
        members, children = nodes[left.pop()]
        if sum(masses[i] for i in members) <= capacity:
            found.add(members)
        else:
            assert children is not None
            left += children
    return found


@pytest.mark.parametrize("seed", range(8))
def test_algorithm_2_is_ward_cut_by_samples(seed: int) -> None:
    """The m largest groups are whole in a distribution each; the others fill these up."""
    source = np.random.Generator(np.random.Philox(seed))
    points, count = source.normal(size=(11, 3)).astype(np.float32), 4
    samples = source.integers(5, 12, 11).tolist()
    own = heard_of({i: row.tolist() for i, row in enumerate(points)}, "l2", 11)
    table = Clustered(by="updates", similarity="l2").distributions(known(samples, count, own))
    capacity, masses = sum(samples), [count * n for n in samples]
    groups = ward_by_definition(points.astype(np.float64), masses, capacity)
    largest = sorted(groups, key=lambda group: (-sum(masses[i] for i in group), min(group)))[:count]
    for row, group in zip(table, largest, strict=True):
        assert all(row[i] == masses[i] for i in group)
    rest = sorted(set(range(11)) - set().union(*largest))
    assert all(table[:, i].sum() == masses[i] for i in rest)


def test_clients_with_like_updates_share_a_distribution() -> None:
    vectors = {i: [1.0, 0.1 * i, 0.0] if i % 2 else [0.0, 0.1 * i, 1.0] for i in range(6)}
    own = heard_of(vectors, "arccos", 6)
    table = Clustered(by="updates").distributions(known([5] * 6, 2, own))
    assert {frozenset(np.flatnonzero(row).tolist()) for row in table} == {frozenset({1, 3, 5}), frozenset({0, 2, 4})}


def test_angles_do_not_see_lengths_and_the_sum_of_differences_does() -> None:
    vectors = {0: [1.0, 0.0], 1: [9.0, 0.1], 2: [0.0, 1.2], 3: [0.1, 9.0]}
    groups = {}
    for metric in ("arccos", "l1"):
        table = Clustered(by="updates", similarity=metric).distributions(
            known([5] * 4, 2, heard_of(vectors, metric, 4))
        )
        groups[metric] = {frozenset(np.flatnonzero(row).tolist()) for row in table}
    assert groups["arccos"] == {frozenset({0, 1}), frozenset({2, 3})}
    assert frozenset({0, 2}) in groups["l1"]


def test_a_client_with_more_than_a_distribution_has_some_to_itself() -> None:
    own = random_updates(5, 1)
    table = Clustered(by="updates").distributions(known([30, 1, 2, 3, 1], 3, own))
    assert table[:2].tolist() == [[37, 0, 0, 0, 0]] * 2
    assert table[2].tolist() == [3 * 30 - 2 * 37, 3, 6, 9, 3]
    equal = Clustered(by="updates").distributions(known([4, 4, 4], 3, random_updates(3, 1)))
    assert sorted(map(tuple, equal.tolist())) == [(0, 0, 12), (0, 12, 0), (12, 0, 0)]


def test_distributions_are_over_the_clients_that_can_be_asked() -> None:
    state = replace(known([7, 3, 5, 1, 4, 9], 2, random_updates(6, 1)), able=np.array([1, 2, 5]))
    for strategy in CASES[:2]:
        assert strategy.distributions(state).sum(axis=0).tolist() == [6, 10, 18]
        assert set(strategy.choose(state).tolist()) <= {1, 2, 5}


def test_draws_follow_the_distributions() -> None:
    strategy, samples, count = Clustered(), [7, 3, 5, 1, 4], 3
    table = strategy.distributions(known(samples, count))
    draws = np.array([strategy.choose(known(samples, count, seed=seed)) for seed in range(3000)])
    for row, column in zip(table, draws.T, strict=True):
        share = np.bincount(column, minlength=5) / len(draws)
        assert share == pytest.approx(row / row.sum(), abs=4 * math.sqrt(0.25 / len(draws)))


@pytest.mark.parametrize(
    "options", [{"similarity": "l2"}, {"by": "size", "similarity": "l1"}, {"by": "updates", "similarity": "cosine"}]
)
def test_a_similarity_of_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="similarity"):
        Clustered(**options)
