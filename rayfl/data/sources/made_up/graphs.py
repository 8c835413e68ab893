"""Made-up graphs whose classes are small patterns in them; clients differ in what their nodes' numbers say."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.graphs import Graph, GraphRows
from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_PATTERN = 5
"""Nodes of a pattern."""
_PATTERNS = (
    ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)),
    tuple((i, j) for j in range(_PATTERN) for i in range(j)),
    ((0, 1), (0, 2), (0, 3), (0, 4)),
    ((0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)),
)
"""By class the edges of its pattern: a ring, a clique, a star, and two nodes with three common neighbours."""


class SyntheticGraphsSource(MadeUpSource):
    """Random trees with further edges, in which a pattern of the class is planted.

    A graph has from half of ``nodes`` nodes to all of them. They are a random recursive tree, with further edges
    between random nodes: a share of the nodes that client k has drawn from [0, 2 edges]. Each graph has ``patterns``
    patterns of its class on 5 nodes each, drawn from all: a ring (class 0), a clique (1), a star (2), and two nodes
    with three common neighbours (3). Node v has the numbers z_v, and those of a pattern z_v + signal (sqrt(1 - own^2)
    u_c + own v_kc), all entries drawn from N(0, 1): structure tells the same at all clients, and what numbers say of a
    class is more or less the client's own. Classes are uniform.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "samples", "nodes", "dimension")

    name: Literal["synthetic_graphs"] = Field(default="synthetic_graphs", description="Made-up graphs of classes.")
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    samples: int = Field(default=40, ge=1, description="Graphs of a client.")
    classes: int = Field(default=4, ge=2, le=len(_PATTERNS), description="Ring, clique, star, common neighbours.")
    nodes: int = Field(default=20, ge=2 * _PATTERN, le=1000, description="Most nodes of a graph.")
    patterns: int = Field(default=1, ge=1, le=100, description="Patterns of its class in a graph.")
    edges: float = Field(default=0.2, ge=0, le=10, description="Mean of the further edges, as a share of the nodes.")
    dimension: int = Field(default=4, ge=1, description="Numbers of a node.")
    signal: float = Field(default=1.0, ge=0, le=1e6, description="How much numbers of nodes in patterns tell.")
    own: float = Field(default=0.9, ge=0, le=1, description="How much of what they tell is the client's own.")

    @property
    def least_bytes(self) -> int:
        nodes = 3 * self.nodes / 4  # on average, in a tree of edges of 16 bytes
        return int(self.num_clients * self.samples * nodes * (16 + 4 * self.dimension))

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' graphs, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        common = streams.generator("synthetic").normal(size=(self.classes, self.dimension))
        graphs, labels = list[Graph](), list[np.ndarray]()
        for client in range(self.num_clients):
            generator = streams.generator("synthetic", client=client)
            own = np.sqrt(1 - self.own**2) * common + self.own * generator.normal(size=common.shape)
            share = generator.uniform(0, 2 * self.edges)
            labels.append(generator.integers(self.classes, size=self.samples))
            graphs += [self._graph(label, self.signal * own[label], share, generator) for label in labels[-1].tolist()]
        x, y = GraphRows(graphs, self.nodes), np.concatenate(labels)
        spec = InputSpec("graph", x.shape[1:], self.classes)
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))

    def _graph(self, label: int, shift: np.ndarray, share: float, generator: np.random.Generator) -> Graph:
        count = int(generator.integers(self.nodes // 2, self.nodes, endpoint=True))
        child = np.arange(1, count)
        tree = np.stack([child, generator.integers(child)], 1)
        further = generator.integers(count, size=(round(share * count), 2))
        further = further[further[:, 0] != further[:, 1]]
        edges, numbers = [tree, further], generator.normal(size=(count, self.dimension))
        planted = np.zeros(count, dtype=bool)
        for _ in range(self.patterns):
            members = generator.permutation(count)[:_PATTERN]
            edges.append(members[np.array(_PATTERNS[label])])
            planted[members] = True
        numbers[planted] += shift
        return Graph(np.concatenate(edges), numbers.astype(np.float32))
