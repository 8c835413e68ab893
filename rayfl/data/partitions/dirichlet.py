"""Partitions whose label distributions are drawn from Dirichlet distributions."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.partitions.base import SkewedPartition, dealt_classes, sorted_union
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

_MOST_DRAWS = 1000


class DirichletPartition(SkewedPartition):
    """Every class is cut among the clients by proportions from a Dirichlet distribution (Yurochkin et al., 2019).

    Hsu et al. (2019) draw each client's proportions of classes instead, as ``dirichlet_equal`` does. With ``cap`` a
    client that holds N / K samples or more gets no part of further classes, which softly balances the sizes (Yurochkin
    et al., 2019; Wang et al., FedMA, 2020; the published code of SuPerFed). With ``size_alpha`` the proportions are
    multiplied by factors from a second Dirichlet distribution over clients. With ``classes_per_client`` a class is cut
    among the clients that it was dealt to, as by ``classes`` (extended Dirichlet, Li and Lyu, 2023). With
    ``by="group"`` groups of people stand in the place of classes (Ezzeldin et al., FairFed, 2023).
    """

    name: Literal["dirichlet"] = Field(
        default="dirichlet",
        description="Cut every class among the clients by Dirichlet proportions.",
    )
    alpha: float = Field(gt=0, description="Concentration: small for few classes per client, large for uniform.")
    by: Literal["class", "group"] = Field(
        default="class",
        description="What is cut: class, or group, groups of people of data that name them (docs/group-fairness.md).",
    )
    cap: bool = Field(default=True, description="Whether clients with N / K samples get nothing of further classes.")
    size_alpha: float | None = Field(
        default=None, gt=0, description="Concentration of size factors over clients; null: no such factors."
    )
    classes_per_client: int | None = Field(
        default=None, ge=1, description="Most classes of a client, dealt as by `classes`; null: all."
    )
    min_samples: int = Field(default=1, ge=1, description="Least number of samples of a client.")
    small_clients: Literal["redraw", "drop"] = Field(
        default="redraw",
        description="What to do when a client has fewer: draw all proportions again (FedMA), and the factors of "
        "size_alpha with them, or leave the client and its samples out (the published code of SuPerFed, with 11).",
    )

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; with ``small_clients="drop"`` there may be fewer than K arrays.

        Raises:
            DataError: no draw of a thousand gives every client ``min_samples``, all clients would be left out, or
                some class would go to nobody.
        """
        generator = streams.generator("split")
        factors = np.ones(self.num_clients)
        for _ in range(_MOST_DRAWS):
            if self.size_alpha is not None:  # again, too: one factor near 0 would fail every draw of proportions
                factors = generator.dirichlet(np.full(self.num_clients, self.size_alpha))
            parts = [sorted_union(chunks) for chunks in self._draw(labels, factors, generator)]
            enough = [part for part in parts if len(part) >= self.min_samples]
            if not enough and self.small_clients == "drop":
                raise DataError(
                    f"partition.min_samples is {self.min_samples}, but none of {self.num_clients} clients has as many, "
                    f"the largest {max(map(len, parts))}: lower it, or partition.num_clients"
                )
            if len(enough) == len(parts) or self.small_clients == "drop":
                return enough
        sizes = "" if self.size_alpha is None else "partition.size_alpha or "
        raise DataError(
            f"partition.alpha is {self.alpha}: in {_MOST_DRAWS} draws some client had fewer than "
            f"{self.min_samples} samples; raise {sizes}partition.alpha, lower partition.num_clients or "
            "partition.min_samples, or set partition.small_clients=drop"
        )

    def _draw(self, labels: np.ndarray, factors: np.ndarray, generator: np.random.Generator) -> list[list[np.ndarray]]:
        clients = self.num_clients
        parts: list[list[np.ndarray]] = [[np.empty(0, dtype=np.int64)] for _ in range(clients)]
        held, classes, dealt = np.zeros(clients, dtype=np.int64), np.unique(labels), None
        if self.classes_per_client is not None:
            dealt = dealt_classes(classes, clients, self.classes_per_client, generator)
        for label in classes:
            may = np.array([dealt is None or label in dealt[client] for client in range(clients)])
            samples = generator.permutation(np.flatnonzero(labels == label))
            free = may & (held < len(labels) / clients)
            # Zero for some and scaled, the proportions are those of a Dirichlet distribution over the others.
            share = np.where(
                free if self.cap else may, generator.dirichlet(np.full(clients, self.alpha)) * factors, 0.0
            )
            if not share.sum() > 0:  # all of a tiny concentration's mass lay on clients that are full
                share = (free if free.any() else may).astype(float)
            cuts = np.floor(np.cumsum(share / share.sum())[:-1] * len(samples) + 1e-9).astype(np.int64)
            for client, chunk in enumerate(np.split(samples, cuts)):
                parts[client].append(chunk)
                held[client] += len(chunk)
        return parts


class DirichletEqualPartition(SkewedPartition):
    """Clients of equal size, each with label proportions of its own from a Dirichlet distribution.

    Slots are filled one after the other, in a random order of all clients' slots: the slot's client draws a class from
    its proportions, restricted to classes that have samples left. All samples are dealt; sizes differ by at most one.
    (The published code of FLOCO draws each time among the clients that are not full, all with the same probability.)
    """

    name: Literal["dirichlet_equal"] = Field(
        default="dirichlet_equal",
        description="Clients of equal size with Dirichlet label proportions.",
    )
    alpha: float = Field(gt=0, description="Concentration of the label proportions.")

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class."""
        generator = streams.generator("split")
        stock = Stock(labels, generator)
        proportions = generator.dirichlet(np.full(stock.num_classes, self.alpha), size=self.num_clients)
        sizes = np.array([len(part) for part in np.array_split(np.arange(len(labels)), self.num_clients)])
        # Of a shuffled list of slots the next one belongs to a client in proportion to the slots it has left.
        slots = generator.permutation(np.repeat(np.arange(self.num_clients), sizes))
        draws = generator.random(len(slots))
        parts: list[list[int]] = [[] for _ in range(self.num_clients)]
        for client, draw in zip(slots, draws, strict=True):
            parts[client].append(stock.take_one(proportions[client], draw))
        return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


class LabelAndSizePartition(SkewedPartition):
    """Sizes from one Dirichlet distribution over clients, labels from another per client (FedMe, section 5).

    Clients draw, in random order, from their label proportions restricted to classes that have samples left.
    """

    name: Literal["label_and_size"] = Field(
        default="label_and_size", description="Sizes and label proportions from two Dirichlet distributions."
    )
    alpha_label: float = Field(default=0.5, gt=0, description="Concentration of a client's label proportions.")
    alpha_size: float = Field(default=10.0, gt=0, description="Concentration of the sizes.")

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class."""
        generator = streams.generator("split")
        stock = Stock(labels, generator)
        sizes = self._sizes(len(labels), generator)
        parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * self.num_clients
        for client in generator.permutation(self.num_clients):
            proportions = generator.dirichlet(np.full(stock.num_classes, self.alpha_label))
            parts[client] = np.sort(stock.take(proportions, int(sizes[client]), generator))
        return parts

    def _sizes(self, total: int, generator: np.random.Generator) -> np.ndarray:
        """Positive integers that sum to ``total``."""
        share = generator.dirichlet(np.full(self.num_clients, self.alpha_size))
        cuts = np.floor(np.cumsum(share)[:-1] * (total - self.num_clients) + 1e-9).astype(np.int64)
        return np.diff(np.concatenate([[0], cuts, [total - self.num_clients]])) + 1


class Stock:
    """Shuffled samples by class, taken away bit by bit.

    Args:
        labels: labels of all samples, shape (N,).
        generator: shuffles within classes.
    """

    def __init__(self, labels: np.ndarray, generator: np.random.Generator) -> None:
        self._classes = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        self._left = np.array([len(samples) for samples in self._classes])

    @property
    def num_classes(self) -> int:
        """Number of classes that occur."""
        return len(self._classes)

    def take_one(self, proportions: np.ndarray, draw: float) -> int:
        """One sample of a class drawn from ``proportions``, as far as any is left; ``draw`` is uniform on [0, 1)."""
        cumulative = np.cumsum(self._restricted(proportions))
        label = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
        return int(self._remove(label, 1)[0])

    def take(self, proportions: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
        """Samples whose classes are drawn from ``proportions``, restricted to what is left."""
        taken: list[np.ndarray] = []
        while count > 0:
            weights = self._restricted(proportions)
            wanted = np.minimum(generator.multinomial(count, weights / weights.sum()), self._left)
            for label in np.flatnonzero(wanted):
                taken.append(self._remove(int(label), int(wanted[label])))
            count -= int(wanted.sum())
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def _restricted(self, proportions: np.ndarray) -> np.ndarray:
        """Proportions of the classes that are left; equal ones where all their mass is on classes that are not."""
        weights = np.where(self._left > 0, proportions, 0.0)
        return weights if weights.sum() > 0 else (self._left > 0).astype(float)

    def _remove(self, label: int, count: int) -> np.ndarray:
        start = self._left[label] - count
        samples = self._classes[label][start : self._left[label]]
        self._left[label] = start
        return samples
