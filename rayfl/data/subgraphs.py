"""Clients that have one graph each, whose nodes have classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.graphs import GraphRows
from rayfl.examples import SPLITS, Examples, InputSpec
from rayfl.metrics.language import IGNORED


class SubgraphDataset(FederatedDataset):
    """One sample for each client and split: the client's whole graph, and the classes of the split's nodes.

    A split in which no node counts has no sample.

    Args:
        names: the clients.
        graphs: theirs.
        labels: by client the class of each node, int of shape (nodes,).
        splits: by client the split of each node, a position in ``SPLITS``, or -1 for none, int of shape (nodes,).
        num_classes: C.
        remarks: looks for what a user should be warned of.
    """

    sound = True

    def __init__(
        self,
        names: Sequence[str],
        graphs: GraphRows,
        labels: Sequence[np.ndarray],
        splits: Sequence[np.ndarray],
        num_classes: int,
        remarks: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.names = tuple(names)
        self.spec = InputSpec("graph", graphs.shape[1:], num_classes, target="nodes")
        self.remarks = remarks
        self.content_hash = self._checksum
        self._graphs, self._labels, self._of = graphs, labels, splits

    def sizes(self) -> np.ndarray:
        """See the base class; 1 where a node counts."""
        return np.array([[(own == split).any() for split in range(len(SPLITS))] for own in self._of], dtype=np.int64)

    def load(self, client: int) -> Mapping[str, Examples]:
        """See the base class; x of shape (1, n, n + d), y of shape (1, n)."""
        return OnDemand(lambda split: self._split(client, split))

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {split: self._targets(client, split) for split in SPLITS}

    def _split(self, client: int, split: str) -> Examples:
        y = self._targets(client, split)
        return Examples(torch.from_numpy(self._graphs[client : client + 1][: len(y)]), torch.from_numpy(y))

    def _targets(self, client: int, split: str) -> np.ndarray:
        counts = self._of[client] == SPLITS.index(split)
        y = np.full((1, self.spec.shape[0]), IGNORED, dtype=np.int64)
        y[0, : len(counts)][counts] = self._labels[client][counts]
        return y if counts.any() else y[:0]

    def _checksum(self) -> str:
        known = np.full((len(self.names), 2, self.spec.shape[0]), IGNORED, dtype=np.int64)
        for row, labels, splits in zip(known, self._labels, self._of, strict=True):
            row[0, : len(labels)], row[1, : len(splits)] = labels, splits
        return self._graphs.checksum(known, self.names)
