"""Graphs of who exchanges models with whom, as plain data, and the weights with which neighbours are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams

Kind = Literal["random", "matching", "ring", "torus", "exponential", "complete", "regular", "erdos_renyi"]
Links = np.ndarray
"""Bool of shape (n, n) with a False diagonal: [i, j] says that i gets what j sends."""

_TRIES = 200
"""How many graphs are drawn until one is connected."""


@dataclass(frozen=True)
class Topology:
    """A graph over the clients.

    Attributes:
        kind: its form. ``random`` and ``matching`` are drawn in every round among those that take part; all others are
            fixed.
        degree: links of a client: of ``regular`` exactly, of ``random`` as many as a client draws.
        probability: of a link of ``erdos_renyi``.
    """

    kind: Kind
    degree: int
    probability: float

    @property
    def drawn(self) -> bool:
        """Whether every round has a graph of its own."""
        return self.kind in ("random", "matching")

    def check(self, clients: int) -> None:
        """Refuses a graph that these clients cannot have.

        Args:
            clients: K.

        Raises:
            ConfigError: naming the option and the fix.
        """
        chosen = f"algorithm.topology is {self.kind}"
        if clients < 2:
            raise ConfigError(f"{chosen}, but there is {clients} client: it takes two to exchange models")
        if self.kind == "torus" and _rows(clients) == 1:
            raise ConfigError(
                f"{chosen}, but {clients} clients fill no rectangle of more than one row: choose another number of "
                "clients, or algorithm.topology=ring"
            )
        if self.kind == "regular" and self.degree >= clients:
            raise ConfigError(
                f"algorithm.neighbours is {self.degree}, but a client has only {clients - 1} others: set it to that or "
                "less, or set algorithm.topology=complete"
            )
        if self.kind == "regular" and self.degree * clients % 2:
            raise ConfigError(
                f"{chosen} with algorithm.neighbours={self.degree}, but {clients} times {self.degree} ends "
                "make no whole number of links: make one of the two even"
            )
        if self.kind == "regular" and self.degree == 1 and clients > 2:
            raise ConfigError(f"{chosen} with algorithm.neighbours=1, which links pairs alone: set it to 2 or more")

    def fixed(self, clients: int, streams: RandomStreams) -> Links:
        """Returns the graph over all clients, which is symmetric and connected.

        Args:
            clients: K.
            streams: a graph that is drawn comes from the stream ``topology``.

        Raises:
            ConfigError: none that was drawn is connected.
        """
        return _fixed(self, clients, streams)

    def of_round(self, context: RoundContext, cohort: Sequence[int]) -> Links:
        """Returns the links among the clients that take part in a round, in their order.

        Those of a fixed graph are the links that it has among them. With ``random`` each draws ``degree`` of the
        others, or all where they are fewer, whose models it gets: that need not be symmetric. With ``matching`` they
        are paired at random, and one of an odd number is alone.

        Args:
            context: the round.
            cohort: the clients.
        """
        if not self.drawn:
            return self.fixed(context.num_clients, context.streams)[np.ix_(cohort, cohort)]
        found = np.zeros((len(cohort), len(cohort)), dtype=bool)
        if self.kind == "matching":
            places = context.streams.generator("topology", context.round).permutation(len(cohort))
            half = len(cohort) // 2
            found[places[:half], places[half : 2 * half]] = True
            return both_ways(found)
        count = min(self.degree, len(cohort) - 1)
        for row, client in enumerate(cohort):
            others = np.delete(np.arange(len(cohort)), row)
            found[row, context.streams.generator("topology", context.round, client).permutation(others)[:count]] = True
        return found


def both_ways(links: Links) -> Links:
    """Returns the graph in which two exchange models if one of them gets the other's."""
    found: Links = links | links.T
    return found


def metropolis(links: Links) -> np.ndarray:
    """Metropolis-Hastings weights: W_ij = 1 / (1 + max(d_i, d_j)) of linked i and j, and W_ii what is left to 1.

    W is symmetric and doubly stochastic, whatever the graph. In a complete graph all weights are 1/n.

    Args:
        links: symmetric, shape (n, n).

    Returns:
        float64 of shape (n, n).

    Source: Xiao, Boyd: Fast Linear Iterations for Distributed Averaging, Systems & Control Letters 2004.
    """
    degrees = links.sum(1)
    weights = np.where(links, 1 / (1 + np.maximum.outer(degrees, degrees)), 0.0)
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def spectral_gap(weights: np.ndarray) -> float:
    """Returns 1 - max(|lambda_2|, |lambda_n|): the rate at which repeated mixing goes to the mean; 0 if it does not.

    Args:
        weights: W, symmetric and doubly stochastic, shape (n, n).
    """
    sizes = np.sort(np.abs(np.linalg.eigvalsh(weights)))
    return 1.0 if len(sizes) == 1 else max(float(1 - sizes[-2]), 0.0)


def connected(links: Links) -> bool:
    """Returns whether every client can be reached from every other one."""
    from scipy.sparse.csgraph import connected_components  # slow to import, and no use to methods with a server

    return int(connected_components(links, directed=False)[0]) == 1


@lru_cache(maxsize=8)
def _fixed(topology: Topology, clients: int, streams: RandomStreams) -> Links:
    steps: Callable[[], list[int]] | None = {
        "ring": lambda: [1],
        "exponential": lambda: [2**power for power in range((clients - 1).bit_length())],
        "complete": lambda: list(range(1, clients)),
    }.get(topology.kind)
    if steps is not None:
        found = _circle(clients, steps())
    elif topology.kind == "torus":
        rows = _rows(clients)
        columns = clients // rows
        down, across = _circle(rows, [1]), _circle(columns, [1])
        found = np.kron(down, np.eye(columns, dtype=bool)) | np.kron(np.eye(rows, dtype=bool), across)
    else:
        found = _drawn(topology, clients, streams)
    found.flags.writeable = False  # it is kept for all rounds
    return found


def _circle(clients: int, steps: Sequence[int]) -> Links:
    """Links each client to those that lie these steps ahead of it or behind it on a circle."""
    found = np.zeros((clients, clients), dtype=bool)
    places = np.arange(clients)
    for step in steps:
        found[places, (places + step) % clients] = True
    np.fill_diagonal(found, False)
    return both_ways(found)


def _rows(clients: int) -> int:
    """Returns the rows of the rectangle of all clients that is nearest to a square."""
    return next(rows for rows in range(int(clients**0.5), 0, -1) if clients % rows == 0)


def _drawn(topology: Topology, clients: int, streams: RandomStreams) -> Links:
    """Returns the first drawn graph that is connected."""
    generator = streams.generator("topology")
    for _ in range(_TRIES):
        if topology.kind == "regular":
            found = _regular(clients, topology.degree, generator)
        else:
            found = both_ways(np.triu(generator.random((clients, clients)) < topology.probability, 1))
        if found is not None and connected(found):
            return found
    regular, enough = topology.kind == "regular", float(np.log(clients) / clients)
    fix = "algorithm.neighbours" if regular else f"algorithm.edge_probability (ln K / K is {enough:.2g})"
    raise ConfigError(
        f"algorithm.topology is {topology.kind}, but none of {_TRIES} graphs that were drawn links all {clients} "
        f"clients with one another: raise {fix}"
    )


def _regular(clients: int, degree: int, generator: np.random.Generator) -> Links | None:
    """Returns a graph in which all have ``degree`` links, by pairing loose ends; None where that came to no end."""
    if degree > (clients - 1) // 2:  # who is not linked is drawn, which are fewer
        rest = _regular(clients, clients - 1 - degree, generator)
        return None if rest is None else ~rest & ~np.eye(clients, dtype=bool)
    found = np.zeros((clients, clients), dtype=bool)
    loose = np.repeat(np.arange(clients), degree)
    while len(loose):
        left = []
        for one, other in generator.permutation(loose).reshape(-1, 2):
            if one == other or found[one, other]:
                left += [one, other]
            else:
                found[one, other] = found[other, one] = True
        if len(left) == len(loose):
            return None
        loose = np.array(left, dtype=np.int64)
    return found
