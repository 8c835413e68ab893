"""Statistics of a federated data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.data.federated import FederatedDataset
from rayfl.data.partitions.stats import Spread, dataset_stats
from rayfl.errors import DataError
from rayfl.examples import Examples, InputSpec


class Labels(FederatedDataset):
    """Two clients, given as labels by split."""

    names = ("ann", "bob")

    def __init__(self, clients: list[dict[str, list[int]]], num_classes: int) -> None:
        self.spec = InputSpec("image", (1,), num_classes)
        self._clients = clients
        self.loaded: list[int] = []

    def sizes(self) -> np.ndarray:
        return np.array([[len(client[split]) for split in ("train", "validation", "test")] for client in self._clients])

    def load(self, client: int) -> dict[str, Examples]:
        self.loaded.append(client)
        return {
            split: Examples(torch.zeros(len(labels), 1), torch.tensor(labels, dtype=torch.int64))
            for split, labels in self._clients[client].items()
        }


ANN = {"train": [0, 0, 1], "validation": [1], "test": [2]}
BOB = {"train": [2], "validation": [], "test": [2, 2]}


def test_sizes_and_labels_are_counted():
    dataset = Labels([ANN, BOB], num_classes=4)
    stats = dataset_stats(dataset)
    assert dataset.loaded == [0, 1]
    assert stats.num_clients == 2
    assert stats.samples == {"train": 4, "validation": 1, "test": 3}
    assert stats.client_sizes["train"] == Spread(1, 2.0, 1.0, 3)
    assert stats.client_sizes["validation"] == Spread(0, 0.5, 0.5, 1)
    assert stats.client_sizes["test"] == Spread(1, 1.5, 0.5, 2)
    assert stats.client_classes == Spread(1, 2.0, 1.0, 3)
    assert stats.label_counts.tolist() == [2, 2, 4, 0]


def test_rows_are_texts_for_a_table():
    rows = dict(dataset_stats(Labels([ANN, BOB], num_classes=4)).rows())
    assert rows["clients"] == "2"
    assert rows["train samples"] == "4"
    assert rows["train samples per client"] == "min 1, mean 2.00, std 1.00, max 3"
    assert rows["classes per client"] == "min 1, mean 2.00, std 1.00, max 3"
    assert rows["samples by label"] == "0: 2, 1: 2, 2: 4, 3: 0"


def test_labels_beyond_the_classes_name_the_client():
    with pytest.raises(DataError, match="client 'bob' has labels from 2 to 2"):
        dataset_stats(Labels([{**ANN, "test": [1]}, BOB], num_classes=2))
