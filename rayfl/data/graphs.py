"""Graphs as inputs: kept as lists of edges, and read as one dense array each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.data.files.content import ContentHash
from rayfl.errors import DataError


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph.

    Attributes:
        edges: pairs of nodes, int of shape (e, 2), each in one direction or in both.
        numbers: of the nodes, float32 of shape (nodes, d); d may be 0.
        weights: of the edges, at least 0, float32 of shape (e,); None: 1.
    """

    edges: np.ndarray
    numbers: np.ndarray
    weights: np.ndarray | None = None

    def dense(self, nodes: int) -> np.ndarray:
        """Returns the array that models read.

        Args:
            nodes: n, of which the graph has as many or fewer.

        Returns:
            float32 of shape (n, n + 1 + d): the symmetric adjacency, then 1 for nodes that exist, then their numbers.
            An edge that is given twice counts once, with the last of its weights.
        """
        own, width = self.numbers.shape
        found = np.zeros((nodes, nodes + 1 + width), dtype=np.float32)
        values = np.float32(1) if self.weights is None else self.weights
        if len(self.edges):
            one, other = self.edges.T
            found[one, other] = values
            found[other, one] = values
        found[:own, nodes] = 1
        found[:own, nodes + 1 :] = self.numbers
        return found


class GraphRows:
    """Graphs that are read by their places as one array, as rows of an array are.

    Dense arrays of all graphs may need far more memory than their edges do: n^2 numbers for each graph, whatever its
    size, with the nodes n of the largest one.

    Args:
        graphs: all of one d.
        nodes: n; None: as many as the largest graph has.

    Attributes:
        shape: (N, n, n + 1 + d).
        dtype: float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, graphs: Sequence[Graph], nodes: int | None = None) -> None:
        self.graphs = tuple(graphs)
        most = max(len(graph.numbers) for graph in self.graphs) if nodes is None else nodes
        self.shape = (len(self.graphs), most, most + 1 + self.graphs[0].numbers.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: np.ndarray | slice) -> np.ndarray:
        """Returns some graphs, float32 of shape (k, n, n + 1 + d)."""
        places = np.arange(len(self))[which]
        found = np.empty((len(places), *self.shape[1:]), dtype=np.float32)
        for row, place in enumerate(places):
            found[row] = self.graphs[place].dense(self.shape[1])
        return found

    def checksum(self, y: np.ndarray, owners: Sequence[str] = ()) -> str:
        """Returns the checksum of all graphs as arrays, with their targets and owners."""
        content = ContentHash()
        for place in range(len(self)):
            content.update(self[place : place + 1], y[place : place + 1], owners[place : place + 1])
        return content.hexdigest()


def check_graphs(x: Tensor, whose: str, first: int = 0) -> None:
    """Makes sure that arrays are graphs as models read them.

    Args:
        x: float of shape (N, n, n + d), on the CPU.
        whose: what to call them in messages.
        first: the number of the first graph.

    Raises:
        DataError: naming the graph, the node and the fix.
    """
    nodes = x.shape[1]
    edges, exists = x[..., :nodes], x[..., nodes]
    absent = exists != 1
    padded = absent[..., None] | absent[:, None, :]
    for wrong, what in (
        ((exists != 0) & absent, f"column {nodes} is neither 1 (it exists) nor 0 (it fills up)"),
        ((edges < 0).any(-1), "an edge has a weight below 0, whose degree may have no root: take positive weights"),
        (
            (edges != edges.transpose(1, 2)).any(-1),
            "its edges are not those of its column: make the adjacency symmetric",
        ),
        (((edges != 0) & padded).any(-1), "it has an edge that leads to or from a node that does not exist"),
        (absent & (x[..., nodes:] != 0).any(-1), "it does not exist, and has numbers: set its row to 0"),
        ((~absent).sum(-1, keepdim=True) == 0, "the graph has no node at all: leave it out"),
    ):
        if wrong.any():
            graph, node = (int(axis[0]) for axis in torch.nonzero(wrong, as_tuple=True))
            raise DataError(f"{whose}: node {node} of graph {first + graph}: {what}")
