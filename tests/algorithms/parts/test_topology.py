"""Graphs of neighbours: degrees, connection, weights that keep the mean, spectral gaps, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from algorithms.parts.topology import Kind, Links, Topology, both_ways, connected, metropolis, spectral_gap
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams

FIXED: tuple[Kind, ...] = ("ring", "torus", "exponential", "complete", "regular", "erdos_renyi")


def graph(kind: Kind, clients: int, degree: int = 4, probability: float = 0.5, seed: int = 0) -> Links:
    topology = Topology(kind, degree, probability)
    topology.check(clients)
    return topology.fixed(clients, RandomStreams(seed))


def context_of(clients: int, round: int = 0) -> RoundContext:
    return RoundContext(round, 9, clients, TrainConfig(rounds=9), RandomStreams(3))


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("clients", [6, 8, 12, 20, 49])
def test_fixed_graphs_are_symmetric_connected_and_without_loops(kind: Kind, clients: int) -> None:
    links = graph(kind, clients)
    assert links.dtype == bool and links.shape == (clients, clients)
    assert (links == links.T).all() and not links.diagonal().any() and connected(links)


@pytest.mark.parametrize(
    ("kind", "clients", "degree"),
    [
        ("ring", 7, 2), ("ring", 2, 1), ("torus", 12, 4), ("torus", 25, 4), ("torus", 4, 2), ("complete", 9, 8),
        ("exponential", 16, 7), ("exponential", 20, 8), ("regular", 20, 4),
    ],
)  # fmt: skip
def test_all_clients_have_the_degree_of_the_graph(kind: Kind, clients: int, degree: int) -> None:
    assert set(graph(kind, clients).sum(1)) == {degree}


@pytest.mark.parametrize(("clients", "degree"), [(6, 5), (6, 3), (10, 2), (11, 4), (40, 3), (40, 30), (100, 10)])
def test_regular_graphs_are_drawn_by_the_seed(clients: int, degree: int) -> None:
    one, other = (graph("regular", clients, degree, seed=seed) for seed in (0, 1))
    assert set(one.sum(1)) == {degree} and connected(one)
    assert (one == graph("regular", clients, degree)).all()
    assert degree == clients - 1 or (one != other).any()


def test_links_of_a_random_graph_have_its_probability() -> None:
    links = graph("erdos_renyi", 200, probability=0.2)
    assert abs(links.sum() / (200 * 199) - 0.2) < 4 * math.sqrt(0.2 * 0.8 / (100 * 199))


def test_neighbours_on_the_exponential_graph_are_powers_of_two_away() -> None:
    (row,) = np.flatnonzero(graph("exponential", 12)[0])[None]
    assert row.tolist() == [1, 2, 4, 8, 10, 11]


@pytest.mark.parametrize("kind", FIXED)
def test_inv_topology_1_weights_are_doubly_stochastic_on_every_subgraph(kind: Kind) -> None:
    topology, context = Topology(kind, 4, 0.4), context_of(20)
    for cohort in ([0, 1, 2, 5, 11, 19], [7], list(range(20)), [0, 10]):
        links = topology.of_round(context, cohort)
        weights = metropolis(links)
        assert (weights >= 0).all() and (weights == weights.T).all()
        assert np.abs(weights.sum(0) - 1).max() < 1e-15 * len(cohort)
        assert ((weights > 0) == (links | np.eye(len(cohort), dtype=bool))).all()
        expected = graph(kind, 20, probability=0.4, seed=3)[np.ix_(cohort, cohort)]
        assert (links == expected).all()


def test_weights_by_hand() -> None:
    """A path of three: the ends have one neighbour, the middle two."""
    links = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=bool)
    expected = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    assert np.abs(metropolis(links) - expected).max() < 1e-15
    assert np.abs(metropolis(graph("complete", 5)) - 1 / 5).max() < 1e-15


@pytest.mark.parametrize("clients", [5, 8, 20])
def test_spectral_gaps_of_known_graphs(clients: int) -> None:
    assert spectral_gap(metropolis(graph("complete", clients))) == pytest.approx(1, abs=1e-12)
    # the eigenvalues of (I + left + right) / 3 are (1 + 2 cos(2 pi k / K)) / 3
    sizes = [abs(1 + 2 * math.cos(2 * math.pi * k / clients)) / 3 for k in range(1, clients)]
    assert spectral_gap(metropolis(graph("ring", clients))) == pytest.approx(1 - max(sizes), abs=1e-12)
    assert spectral_gap(np.eye(clients)) == 0 and spectral_gap(np.eye(1)) == 1


def test_random_neighbours_change_by_round_and_are_those_of_their_client_alone() -> None:
    topology, cohort = Topology("random", 2, 0.5), [1, 4, 6, 9]
    rounds = [topology.of_round(context_of(10, round), cohort) for round in range(6)]
    assert all((links.sum(1) == 2).all() and not links.diagonal().any() for links in rounds)
    assert len({links.tobytes() for links in rounds}) > 1
    assert (topology.of_round(context_of(10, 2), cohort) == rounds[2]).all()
    symmetric = both_ways(rounds[0])
    assert (symmetric == symmetric.T).all() and (symmetric >= rounds[0]).all()


def test_random_neighbours_are_all_where_few_take_part() -> None:
    topology = Topology("random", 7, 0.5)
    assert topology.of_round(context_of(10), [2, 3, 8]).sum() == 6
    assert topology.of_round(context_of(10), [5]).sum() == 0


@pytest.mark.parametrize(("clients", "pairs"), [(6, 3), (7, 3), (2, 1), (1, 0)])
def test_a_matching_pairs_those_that_take_part(clients: int, pairs: int) -> None:
    topology, cohort = Topology("matching", 2, 0.5), list(range(3, 3 + clients))
    rounds = [topology.of_round(context_of(12, round), cohort) for round in range(6)]
    for links in rounds:
        assert (links == links.T).all() and not links.diagonal().any()
        assert links.sum() == 2 * pairs and links.sum(1).max(initial=0) <= 1
    assert clients < 3 or any((links != rounds[0]).any() for links in rounds)
    assert (topology.of_round(context_of(12, 2), cohort) == rounds[2]).all()


@pytest.mark.parametrize(
    ("topology", "clients", "words"),
    [
        (Topology("ring", 2, 0.5), 1, "there is 1 client"),
        (Topology("torus", 2, 0.5), 13, "13 clients fill no rectangle"),
        (Topology("regular", 8, 0.5), 8, r"algorithm\.neighbours is 8, but a client has only 7 others"),
        (Topology("regular", 3, 0.5), 9, "9 times 3 ends make no whole number of links"),
        (Topology("regular", 1, 0.5), 8, r"links pairs alone: set it to 2 or more"),
    ],
)
def test_graphs_that_cannot_be_are_refused(topology: Topology, clients: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        topology.check(clients)


def test_graphs_that_are_never_connected_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"none of 200 graphs.*raise algorithm\.edge_probability \(ln K / K is 0\.15\)"
    ):
        graph("erdos_renyi", 20, probability=0.001)
    Topology("regular", 1, 0.5).check(2)
    assert graph("regular", 2, 1).sum() == 2


def test_a_graph_is_drawn_once_for_all_rounds() -> None:
    topology = Topology("regular", 4, 0.5)
    context = context_of(30)
    later = replace(context, round=5)
    everyone = list(range(30))
    assert (topology.of_round(context, everyone) == topology.of_round(later, everyone)).all()
    assert not topology.fixed(30, context.streams).flags.writeable
