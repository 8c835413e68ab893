"""What a federated data set looks like: sizes and labels of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayfl.data.federated import FederatedDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS


@dataclass(frozen=True)
class Spread:
    """Smallest, mean, population standard deviation and largest of one number per client."""

    minimum: int
    mean: float
    std: float
    maximum: int

    def __str__(self) -> str:
        return f"min {self.minimum}, mean {self.mean:.2f}, std {self.std:.2f}, max {self.maximum}"


@dataclass(frozen=True, eq=False)
class DatasetStats:
    """Statistics of a federated data set.

    Attributes:
        num_clients: K.
        samples: samples of all clients by split.
        client_sizes: samples per client by split.
        client_classes: distinct labels per client, over all splits.
        label_counts: samples by label over all clients and splits, int64 of shape (num_classes,).
    """

    num_clients: int
    samples: Mapping[str, int]
    client_sizes: Mapping[str, Spread]
    client_classes: Spread
    label_counts: np.ndarray

    def rows(self) -> list[tuple[str, str]]:
        """The statistics as (label, value) texts for a table of two columns."""
        return [
            ("clients", str(self.num_clients)),
            *((f"{split} samples", str(count)) for split, count in self.samples.items()),
            *((f"{split} samples per client", str(spread)) for split, spread in self.client_sizes.items()),
            ("classes per client", str(self.client_classes)),
            ("samples by label", ", ".join(f"{label}: {count}" for label, count in enumerate(self.label_counts))),
        ]


def dataset_stats(dataset: FederatedDataset) -> DatasetStats:
    """Read the clients one at a time and describe them.

    Raises:
        DataError: a client cannot be read or has a label outside [0, num_classes).
    """
    sizes = dataset.sizes()
    num_classes = dataset.spec.num_classes
    label_counts = np.zeros(num_classes, dtype=np.int64)
    classes = np.zeros(dataset.num_clients, dtype=np.int64)
    for client, name in enumerate(dataset.names):
        labels = np.concatenate(list(dataset.labels(client).values()))
        if len(labels) and (labels.min() < 0 or labels.max() >= num_classes):
            raise DataError(
                f"client {name!r} has labels from {labels.min()} to {labels.max()}, but the data set says that it has "
                f"{num_classes} classes; number them 0..{num_classes - 1}"
            )
        counts = np.bincount(labels, minlength=num_classes)
        label_counts += counts
        classes[client] = np.count_nonzero(counts)
    return DatasetStats(
        num_clients=dataset.num_clients,
        samples={split: int(total) for split, total in zip(SPLITS, sizes.sum(axis=0), strict=True)},
        client_sizes={split: _spread(column) for split, column in zip(SPLITS, sizes.T, strict=True)},
        client_classes=_spread(classes),
        label_counts=label_counts,
    )


def _spread(values: np.ndarray) -> Spread:
    return Spread(int(values.min()), float(values.mean()), float(values.std()), int(values.max()))
