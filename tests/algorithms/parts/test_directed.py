"""Directed graphs: who sends to whom, shares that lose nothing, and how soon all have the mean."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms.parts.directed import DirectedGraph, DirectedKind, sent_shares
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams

KINDS: tuple[DirectedKind, ...] = ("one_peer", "random", "exponential", "ring")


def context_of(clients: int, round: int = 0) -> RoundContext:
    return RoundContext(round, 9, clients, TrainConfig(rounds=9), RandomStreams(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cohort", [[0, 1, 2, 3, 4, 5, 6], [1, 4, 6], [5], [2, 3]])
def test_inv_directed_1_shares_sum_to_one_for_whoever_sends(kind: DirectedKind, cohort: list[int]) -> None:
    for round in range(4):
        links = DirectedGraph(kind, 2).of_round(context_of(7, round), cohort)
        assert links.shape == (len(cohort), len(cohort)) and not links.diagonal().any()
        shares = sent_shares(links)
        assert np.abs(shares.sum(0) - 1).max() < 1e-15
        assert ((shares > 0) == (links | np.eye(len(cohort), dtype=bool))).all()


def receivers(kind: DirectedKind, clients: int, round: int = 0, degree: int = 1) -> list[list[int]]:
    links = DirectedGraph(kind, degree).of_round(context_of(clients, round), list(range(clients)))
    return [np.flatnonzero(links[:, sender]).tolist() for sender in range(clients)]


def test_who_sends_to_whom() -> None:
    assert receivers("ring", 4) == [[1], [2], [3], [0]]
    assert receivers("exponential", 6)[0] == [1, 2, 4] and receivers("exponential", 6)[5] == [0, 1, 3]
    assert [receivers("one_peer", 8, round)[0] for round in range(4)] == [[1], [2], [4], [1]]
    drawn = [receivers("random", 9, round, degree=3) for round in range(3)]
    assert all(len(found) == 3 for row in drawn for found in row) and drawn[0] != drawn[1]
    assert receivers("random", 3, degree=7) == [[1, 2], [0, 2], [0, 1]]
    assert receivers("random", 9, 2, degree=3) == drawn[2]


def test_fixed_graphs_have_the_links_among_those_that_take_part() -> None:
    whole = DirectedGraph("exponential", 1).of_round(context_of(9), list(range(9)))
    assert (
        DirectedGraph("exponential", 1).of_round(context_of(9), [1, 3, 8]) == whole[np.ix_([1, 3, 8], [1, 3, 8])]
    ).all()
    assert DirectedGraph("ring", 1).of_round(context_of(9), [0, 2, 4]).sum() == 0
    assert DirectedGraph("one_peer", 1).of_round(context_of(9), [0, 2, 4]).sum() == 3


@pytest.mark.parametrize("clients", [2, 4, 16])
def test_inv_directed_2_one_peer_makes_all_equal_after_log2_n_rounds(clients: int) -> None:
    whole = np.eye(clients)
    for round in range(clients.bit_length() - 1):
        whole = sent_shares(DirectedGraph("one_peer", 1).of_round(context_of(clients, round), range(clients))) @ whole
    assert np.abs(whole - 1 / clients).max() < 1e-15


def test_one_client_is_refused() -> None:
    DirectedGraph.check(2)
    with pytest.raises(ConfigError, match=r"there is 1 client, but it takes two .* raise dataset\.num_clients"):
        DirectedGraph.check(1)
