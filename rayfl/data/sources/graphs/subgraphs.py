"""Graphs whose nodes have classes, one for each client: from a user's own tables, or made up."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.communities import communities
from rayfl.data.graphs import Graph, GraphRows
from rayfl.data.partitions.owners import places_by_owner
from rayfl.data.sources.base import Source
from rayfl.data.sources.graphs.node_files import NodeTable, read_nodes
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.data.sources.rows.parquet import located
from rayfl.data.subgraphs import SubgraphDataset
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

_TEST, _VALIDATION = 0.3, 0.3
_LARGE = 256 << 20
"""Bytes of a client's array from which on that is said."""


class _OwnSplits(Source):
    """What sources of one graph a client have in common: which nodes are held out."""

    test: float = Field(default=_TEST, ge=0, lt=1, description="Share of a client's nodes held out for testing.")
    validation: float = Field(default=_VALIDATION, ge=0, lt=1, description="Share of them held out for validation.")

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if self.test + self.validation >= 1:
            raise ValueError("test and validation leave no node to train on: together they must be less than 1")
        return self

    def _drawn(self, labels: np.ndarray, client: int, name: str, streams: RandomStreams) -> np.ndarray:
        """The split of each node, drawn by the stream ``holdout``; -1 for nodes without a class."""
        having = streams.generator("holdout", client=client).permutation(np.flatnonzero(labels >= 0))
        test, validation = (int(share * len(having) + 1e-9) for share in (self.test, self.validation))
        if len(having) <= test + validation:
            raise DataError(f"client {name!r} has no node with a class: remove it, or set fewer dataset.num_clients")
        found = np.full(len(labels), -1, dtype=np.int64)
        found[having] = 0
        found[having[:validation]] = 1
        found[having[validation : validation + test]] = 2
        return found


class NodeGraphSource(_OwnSplits):
    """Configuration of your own graph, whose nodes are classified: a folder with tables of nodes and of edges.

    ``nodes.csv`` (or .parquet) has a row for each node, with its name, its class, and its numbers in all other columns;
    ``edges.csv`` (or .parquet) has the names of an edge's nodes in the columns source and target, in any direction.
    With a column ``client`` the nodes are divided already. Else they are divided into ``num_clients`` parts, disjoint
    subgraphs as in FED-PUB (Baek et al., ICML 2023), which takes METIS. Edges between clients are lost.
    """

    name: Literal["node_graph"] = Field(default="node_graph", description="Your own graph with a class of each node.")
    path: Path = Field(description="The folder; a relative path is also looked up in RAYFL_DATA.")
    node: str = Field(default="id", description="Column of the nodes' names.")
    label: str = Field(default="label", description="Column of their classes; nodes without a value never count.")
    client: str = Field(default="client", description="Column of their clients, if there is one.")
    split: str = Field(
        default="split", description="Column with train, validation, test or none, if there is one; else it is drawn."
    )
    num_clients: int | None = Field(
        default=None, ge=1, description="Number of parts; null: there is a column of clients."
    )
    division: Literal["communities", "random"] = Field(
        default="communities", description="communities: parts with few edges between them; random: any nodes."
    )

    def open(self, streams: RandomStreams) -> SubgraphDataset:
        """Reads and divides the graph; uses the stream ``split``, and ``holdout`` of each client.

        Raises:
            DataError: naming the file, the column, the row or the client, and the fix.
        """
        folder = located(self.path.expanduser())
        found = read_nodes(folder, self.node, self.label, self.client, self.split)
        names, whose = self._divided(found, folder, streams)
        parts = places_by_owner(whose, len(names))
        given, labels = found.splits, [found.labels[part] for part in parts]
        if given is None:
            splits = [self._drawn(own, *who, streams) for own, who in zip(labels, enumerate(names), strict=True)]
        else:
            if (self.test, self.validation) != (_TEST, _VALIDATION):
                raise DataError(
                    f"dataset.test and dataset.validation: {folder} has a column {self.split!r} that says which nodes "
                    "are held out: leave them out"
                )
            splits = [np.where(own < 0, -1, given[part]) for own, part in zip(labels, parts, strict=True)]
            for name, own in zip(names, splits, strict=True):
                if not (own == 0).any():
                    raise DataError(
                        f"client {name!r} has no node with a class and {self.split}=train: give it one, or remove it"
                    )
        number = np.empty(len(whose), dtype=np.int64)
        for part in parts:
            number[part] = np.arange(len(part))
        one, other = found.edges.T
        inside = whose[one] == whose[other]
        graphs = GraphRows(
            [
                Graph(number[found.edges[inside & (whose[one] == client)]], found.numbers[part])
                for client, part in enumerate(parts)
            ]
        )
        remarks = [*found.remarks, *_lost(int((~inside).sum()), len(inside)), *_large(graphs)]
        return SubgraphDataset(names, graphs, labels, splits, len(found.classes), lambda: remarks)

    def _divided(self, found: NodeTable, folder: Path, streams: RandomStreams) -> tuple[list[str], np.ndarray]:
        """The clients' names, and the client of each node."""
        if (found.clients is None) == (self.num_clients is None):
            fix = "set dataset.num_clients" if found.clients is None else "leave dataset.num_clients out"
            there = "no column" if found.clients is None else "a column"
            raise DataError(f"{folder}: the nodes have {there} {self.client!r} of clients: {fix}")
        if found.clients is not None:
            if self.division != "communities":
                raise DataError(f"dataset.division: {folder} has a column {self.client!r} of clients: leave it out")
            names, whose = np.unique(found.clients, return_inverse=True)
            return names.tolist(), whose
        assert self.num_clients is not None
        nodes = len(found.labels)
        if self.num_clients > nodes:
            raise DataError(f"dataset.num_clients is {self.num_clients}, but there are {nodes} nodes: lower it")
        generator = streams.generator("split")
        if self.division == "random":
            whose = generator.permutation(nodes) % self.num_clients
        else:
            whose = communities(found.edges, nodes, self.num_clients, generator)
        return client_names(self.num_clients, 1).tolist(), whose


class SyntheticSubgraphsSource(_OwnSplits, MadeUpSource):
    """Made-up graphs of stochastic block models, one for each client, with a class of each node.

    A graph has from half of ``nodes`` nodes to all of them. Classes are drawn with client k's probabilities from
    Dir(alpha). A graph has edges for ``degree`` neighbours of each node on average, of which a share ``homophily`` is
    drawn from nodes of its class, others from all nodes; repeated ones count once. A node of class c has the numbers
    z_v + signal (sqrt(1 - own^2) u_c + own v_kc), all entries drawn from N(0, 1): neighbours tell of the class, and
    what numbers say is more or less the client's own.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "nodes", "dimension")

    name: Literal["synthetic_subgraphs"] = Field(
        default="synthetic_subgraphs", description="Made-up graphs with a class of each node."
    )
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    nodes: int = Field(default=60, ge=10, le=20_000, description="Most nodes of a client.")
    classes: int = Field(default=4, ge=2, le=1000, description="Number of classes.")
    alpha: float = Field(default=1.0, gt=0, le=1e6, description="Of the Dirichlet distribution: small for few classes.")
    degree: float = Field(default=4.0, ge=0, le=100, description="Mean number of a node's neighbours.")
    homophily: float = Field(default=0.8, ge=0, le=1, description="Share of edges that are drawn within a class.")
    dimension: int = Field(default=8, ge=1, description="Numbers of a node.")
    signal: float = Field(default=0.7, ge=0, le=1e6, description="How much numbers tell of the class.")
    own: float = Field(default=0.9, ge=0, le=1, description="How much of what they tell is the client's own.")

    @property
    def least_bytes(self) -> int:
        nodes = 3 * self.nodes / 4  # on average, with a class and a split of 8 bytes each
        return int(self.num_clients * nodes * (16 + 4 * self.dimension))

    def open(self, streams: RandomStreams) -> SubgraphDataset:
        """Makes all graphs; uses the stream ``synthetic``, also of each client, and ``holdout`` of each client."""
        self.check_room()
        common = streams.generator("synthetic").normal(size=(self.classes, self.dimension))
        names = client_names(self.num_clients, 1).tolist()
        made = [self._client(client, common, streams) for client in range(self.num_clients)]
        labels = [found for _, found in made]
        splits = [self._drawn(own, *who, streams) for own, who in zip(labels, enumerate(names), strict=True)]
        graphs = GraphRows([graph for graph, _ in made], self.nodes)
        return SubgraphDataset(names, graphs, labels, splits, self.classes, lambda: _large(graphs))

    def _client(self, client: int, common: np.ndarray, streams: RandomStreams) -> tuple[Graph, np.ndarray]:
        generator = streams.generator("synthetic", client=client)
        count = int(generator.integers(self.nodes // 2, self.nodes, endpoint=True))
        labels = generator.choice(self.classes, count, p=generator.dirichlet(np.full(self.classes, self.alpha)))
        means = np.sqrt(1 - self.own**2) * common + self.own * generator.normal(size=common.shape)
        edges = generator.integers(count, size=(round(self.degree * count / 2), 2))
        alike = generator.random(len(edges)) < self.homophily
        chosen = generator.random(len(edges))
        for label in range(self.classes):
            members, here = np.flatnonzero(labels == label), alike & (labels[edges[:, 0]] == label)
            edges[here, 1] = members[(chosen[here] * len(members)).astype(np.int64)]
        edges = edges[edges[:, 0] != edges[:, 1]]
        numbers = self.signal * means[labels] + generator.normal(size=(count, self.dimension))
        return Graph(edges, numbers.astype(np.float32)), labels


def _lost(between: int, edges: int) -> list[str]:
    if not between:
        return []
    return [f"{between} of {edges} edges are between nodes of two clients, and are lost"]


def _large(graphs: GraphRows) -> list[str]:
    size = int(np.prod(graphs.shape[1:])) * graphs.dtype.itemsize
    if size < _LARGE:
        return []
    return [
        f"each client's graph is an array of {graphs.shape[1]} x {graphs.shape[2]} numbers, {size / 2**20:.0f} MiB, "
        "and there is one for each of its splits: more clients have smaller graphs"
    ]
