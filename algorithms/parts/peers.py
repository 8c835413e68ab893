"""Methods without a server's model: clients exchange models with their neighbours in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from algorithms.base import Algorithm, setting
from algorithms.parts.topology import Kind, Topology, metropolis, spectral_gap
from rayfl.engine.round_context import RoundContext
from rayfl.tasks.base import Task

_SLOW = 0.1
"""Spectral gaps below this are named: models of all clients agree after tens of rounds, not after a few."""


class Decentralized(Algorithm):
    """A method whose clients send models to one another, and not to a server.

    Those of a round's cohort take part; all others keep their models, and nobody hears from them. The driver stands for
    the network: what it passes on is counted as what neighbours send each other. Down is what a client gets from its
    neighbours, up what it sends, once for each of them, so that both columns have the same sum over clients. Who the
    neighbours are and the weights of their models are not counted.
    """

    server_keeps: ClassVar[str] = "-"
    no_privacy: ClassVar[str] = "its clients send models to one another, and no server takes a mean of them"


class Peers(Decentralized):
    """A method whose clients exchange models with their neighbours in a graph, in both directions."""

    topology: Kind = setting(
        "random",
        "G",
        "who exchanges models: random (each draws some) or matching (pairs), drawn in every round among those that "
        "take part; or a fixed graph, of which a round has the links among those that take part: ring, torus, "
        "exponential (2^j clients ahead and behind), complete, regular, erdos_renyi",
    )
    neighbours: int = setting(
        2,
        "d",
        "links of every client (regular), or clients whose models each draws (random), all where fewer take part",
        only={"topology": ("random", "regular")},
        ge=1,
    )
    edge_probability: float = setting(
        0.5, "p", "probability of a link between two clients", only={"topology": ("erdos_renyi",)}, gt=0, le=1
    )

    @property
    def graph(self) -> Topology:
        """Returns the graph over the clients."""
        return Topology(self.topology, self.neighbours, self.edge_probability)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        self.graph.check(context.num_clients)
        if not self.graph.drawn:
            self.graph.fixed(context.num_clients, context.streams)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.graph.drawn:
            return ()
        clients, links = context.num_clients, self.graph.fixed(context.num_clients, context.streams)
        gap, degree, found = spectral_gap(metropolis(links)), float(links.sum(1).mean()), []
        if gap < _SLOW:
            found.append(
                f"algorithm.topology={self.topology} has a spectral gap of {gap:.2g} with {clients} clients (1 where "
                f"one exchange makes all models equal): differences fade over about {1 / gap:.0f} rounds"
            )
        if context.smallest_cohort < clients and self.topology != "complete":
            met = degree * (context.mean_cohort - 1) / (clients - 1)
            found.append(
                f"a client has {degree:.3g} neighbours by algorithm.topology={self.topology} and meets {met:.2g} of "
                f"them in a round, as {context.mean_cohort:.3g} of {clients} clients take part: set "
                "train.clients_per_round=all, or algorithm.topology=random"
            )
        return tuple(found)
