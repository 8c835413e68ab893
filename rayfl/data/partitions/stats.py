"""What a federated data set looks like: sizes and labels of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayfl.data.federated import FederatedDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS, InputSpec


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
        client_classes: distinct labels per client, over all splits; None where samples have no classes or labels.
        label_counts: samples by label over all clients and splits, int64 of shape (num_classes,); likewise. Of masks,
            how many samples have the class at some pixel.
        values: of numbers to predict, and of times and events, by number: least, mean, standard deviation and greatest,
            shape (D, 4); else None.
        value_names: what these numbers are called.
        unlabelled: by client, the training samples without a label, which are in no split; None where there are none.
    """

    num_clients: int
    samples: Mapping[str, int]
    client_sizes: Mapping[str, Spread]
    client_classes: Spread | None
    label_counts: np.ndarray | None
    values: np.ndarray | None = None
    value_names: tuple[str, ...] = ()
    unlabelled: np.ndarray | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The statistics as (label, value) texts for a table of two columns."""
        rows = [
            ("clients", str(self.num_clients)),
            *((f"{split} samples", str(count)) for split, count in self.samples.items()),
            *((f"{split} samples per client", str(spread)) for split, spread in self.client_sizes.items()),
        ]
        if self.unlabelled is not None:
            rows.append(("unlabelled training samples", str(int(self.unlabelled.sum()))))
            rows.append(("unlabelled training samples per client", str(_spread(self.unlabelled))))
        if self.client_classes is not None:
            rows.append(("classes per client", str(self.client_classes)))
        if self.label_counts is not None:
            counts = ", ".join(f"{label}: {count}" for label, count in enumerate(self.label_counts))
            rows.append(("samples by label", counts))
        found = np.empty((0, 4)) if self.values is None else self.values
        for name, (least, mean, std, most) in zip(self.value_names, found, strict=True):
            rows.append((name, f"min {least:.6g}, mean {mean:.6g}, std {std:.6g}, max {most:.6g}"))
        return rows


def class_counts(dataset: FederatedDataset, clients: int) -> np.ndarray:
    """Training samples by class of the first clients together, int64 of shape (num_classes,).

    Args:
        dataset: its samples have one class each.
        clients: how many.
    """
    counts = np.zeros(dataset.spec.num_classes, dtype=np.int64)
    for client in range(clients):
        counts += np.bincount(dataset.labels(client)["train"], minlength=len(counts))
    return counts


def dataset_stats(dataset: FederatedDataset) -> DatasetStats:
    """Read the clients one at a time and describe them.

    Raises:
        DataError: a client cannot be read or has a label outside [0, num_classes).
    """
    sizes, spec = dataset.sizes(), dataset.spec
    label_counts = np.zeros(spec.num_classes, dtype=np.int64)
    classes = np.zeros(dataset.num_clients, dtype=np.int64)
    names = _value_names(spec)
    sums, bounds = np.zeros((3, len(names))), np.array([[np.inf], [-np.inf]]).repeat(len(names), 1)
    for client, name in enumerate(dataset.names):
        labels = np.concatenate(list(dataset.labels(client).values()))
        if spec.target == "class":
            counts = np.bincount(_in_range(labels, spec.num_classes, name), minlength=spec.num_classes)
        elif spec.target in ("labels", "mask", "nodes"):
            counts = counts_by_class(labels, spec)
        else:
            if names and len(labels):
                y = labels.astype(np.float64)
                sums += np.stack([np.full(len(names), len(y)), y.sum(0), (y**2).sum(0)])
                bounds = np.stack([np.minimum(bounds[0], y.min(0)), np.maximum(bounds[1], y.max(0))])
            continue
        label_counts += counts
        classes[client] = np.count_nonzero(counts)
    labelled, unlabelled = spec.target in ("class", "labels", "mask", "nodes"), dataset.unlabelled_sizes()
    return DatasetStats(
        num_clients=dataset.num_clients,
        samples={split: int(total) for split, total in zip(SPLITS, sizes.sum(axis=0), strict=True)},
        client_sizes={split: _spread(column) for split, column in zip(SPLITS, sizes.T, strict=True)},
        client_classes=_spread(classes) if labelled else None,
        label_counts=label_counts if labelled else None,
        values=_described(sums, bounds) if names else None,
        value_names=names,
        unlabelled=unlabelled if unlabelled.any() else None,
    )


def _value_names(spec: InputSpec) -> tuple[str, ...]:
    """Returns what the numbers of a target are called; none where it has a class, labels or tokens."""
    if spec.target == "survival":
        return ("time", "event")
    return tuple(f"target {number}" for number in range(spec.num_classes)) if spec.target == "values" else ()


def counts_by_class(targets: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Returns how many nodes of all graphs have each class; else how many samples have each, int64 of shape (C,)."""
    if spec.target == "nodes":
        return np.bincount(targets[targets >= 0], minlength=spec.num_classes)
    found: np.ndarray = present(targets, spec).sum(0)
    return found


def present(targets: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Returns which samples have which labels, or classes at some pixel: bool of shape (n, num_classes)."""
    if spec.target == "labels":
        return targets > 0
    rows = targets.reshape(len(targets), -1)
    return np.stack([(rows == number).any(1) for number in range(spec.num_classes)], 1)


def _in_range(labels: np.ndarray, num_classes: int, client: str) -> np.ndarray:
    if len(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise DataError(
            f"client {client!r} has labels from {labels.min()} to {labels.max()}, but the data set says that it has "
            f"{num_classes} classes; number them 0..{num_classes - 1}"
        )
    return labels


def _described(sums: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Least, mean, standard deviation and greatest by column."""
    n, total, squares = sums
    mean = total / n
    return np.column_stack([bounds[0], mean, np.sqrt(np.maximum(squares / n - mean**2, 0)), bounds[1]])


def _spread(values: np.ndarray) -> Spread:
    return Spread(int(values.min()), float(values.mean()), float(values.std()), int(values.max()))
