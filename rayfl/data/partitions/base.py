"""Ways to divide pooled, labelled samples among clients; each configuration is also the algorithm.

A partition depends on the labels, its own fields and the experiment's seed only. No sample goes to two clients; unless
a partition says otherwise, every sample goes to one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

Reads = Literal["nothing", "order", "classes"]
"""What a partition makes of labels: nothing; their order, which numbers to predict have too; classes."""


class SizedPartition(BaseModel, ABC):
    """A partition whose number of clients is chosen, not given by the data.

    Class attributes:
        reads: what it makes of labels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reads: ClassVar[Reads] = "classes"

    num_clients: int = Field(ge=1, description="Number of clients K; at most the number of samples.")

    @abstractmethod
    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """The samples of every client.

        Args:
            labels: labels of all samples, of shape (N,): integers, or numbers where the partition reads their order.
            streams: the experiment's randomness; uses the stream ``split``.

        Returns:
            K sorted, disjoint, non-empty int64 arrays of indices, whose union is 0..N-1.

        Raises:
            DataError: the labels cannot be divided as asked; names the field to change.
        """

    def _check_enough(self, labels: np.ndarray) -> None:
        if self.num_clients > len(labels):
            raise DataError(
                f"partition.num_clients is {self.num_clients}, but there are only {len(labels)} samples, so some "
                f"clients would be empty; set it to {len(labels)} or less"
            )


class SkewedPartition(SizedPartition):
    """A partition that gives clients different labels; a share of the samples may be dealt evenly all the same."""

    iid_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the samples that is dealt at random, in near-equal numbers, as by `iid`; the others are "
        "divided by the partition (similarity of clients; Karimireddy et al., SCAFFOLD, 2020, section 7); null: none.",
    )

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; uses the stream ``split.iid`` too where there is an ``iid_share``."""
        self._check_enough(labels)
        if self.iid_share is None:
            return self.divide(labels, streams)
        order = streams.generator("split.iid").permutation(len(labels))
        even, rest = np.split(order, [round(self.iid_share * len(labels))])
        if len(rest) < self.num_clients and len(rest):
            raise DataError(
                f"partition.iid_share is {self.iid_share}: the {len(rest)} samples that it leaves are fewer than the "
                f"{self.num_clients} clients; lower it, or set partition.name=iid"
            )
        rest = np.sort(rest)
        parts = self.divide(labels[rest], streams) if len(rest) else [rest] * self.num_clients
        hands = np.array_split(even, len(parts))
        return [sorted_union([rest[part], hand]) for part, hand in zip(parts, hands, strict=True)]

    @abstractmethod
    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """The samples of every client, of those that are not dealt evenly; see :meth:`assign`."""


class PathologicalPartition(SkewedPartition):
    """Shards of the samples sorted by label, dealt to the clients (McMahan et al., 2017, section 3).

    Shards have equal sizes where ``shards_per_client * num_clients`` divides N, and differ by one sample otherwise.
    """

    reads: ClassVar[Reads] = "order"

    name: Literal["pathological"] = Field(
        default="pathological", description="Deal shards of label-sorted samples, so that a client has few labels."
    )
    shards_per_client: int = Field(default=2, ge=1, description="Number of shards that each client gets.")
    assignment: Literal["random", "cyclic"] = Field(
        default="random",
        description="'random' deals the shards in random order (McMahan et al.); 'cyclic' gives client i the shards "
        "i, i + K, i + 2K, ... without randomness (the published code of SuPerFed).",
    )

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; N must be at least the number of shards."""
        num_shards = self.shards_per_client * self.num_clients
        if num_shards > len(labels):
            raise DataError(
                f"partition.num_clients ({self.num_clients}) times partition.shards_per_client "
                f"({self.shards_per_client}) is {num_shards} shards, more than the {len(labels)} samples; "
                "lower one of them"
            )
        shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
        if self.assignment == "cyclic":
            chosen = np.arange(num_shards).reshape(self.shards_per_client, self.num_clients).T
        else:
            dealt = streams.generator("split").permutation(num_shards)
            chosen = dealt.reshape(self.num_clients, self.shards_per_client)
        return [sorted_union([shards[shard] for shard in row]) for row in chosen]


class ClassesPartition(SkewedPartition):
    """A fixed number of distinct classes for each client (Li et al., FedPHP, 2021, published code).

    Clients take consecutive classes from shuffled lists of all classes; the shuffled samples of a class are cut
    into near-equal chunks, one for each client that holds the class. Where ``classes_per_client`` divides the
    number of classes, the clients of one list cover all classes once.
    """

    name: Literal["classes"] = Field(
        default="classes", description="Give every client the same number of classes, each in near-equal parts."
    )
    classes_per_client: int = Field(ge=1, description="Number of distinct classes that each client holds.")

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; the clients together must draw every class that occurs in ``labels``."""
        classes, generator = np.unique(labels), streams.generator("split")
        drawn = dealt_classes(classes, self.num_clients, self.classes_per_client, generator)
        parts: list[list[np.ndarray]] = [[] for _ in drawn]
        for label in classes:
            holders = [client for client, held in enumerate(drawn) if label in held]
            samples = generator.permutation(np.flatnonzero(labels == label))
            if len(samples) < len(holders):
                raise DataError(
                    f"partition.num_clients is {self.num_clients}: class {label} has {len(samples)} samples for the "
                    f"{len(holders)} clients that hold it; lower partition.num_clients or partition.classes_per_client"
                )
            for client, chunk in zip(holders, np.array_split(samples, len(holders)), strict=True):
                parts[client].append(chunk)
        return [sorted_union(chunks) for chunks in parts]


class IIDPartition(SizedPartition):
    """Shuffled samples cut into parts whose sizes differ by at most one."""

    reads: ClassVar[Reads] = "nothing"

    name: Literal["iid"] = Field(default="iid", description="Deal the samples at random, in near-equal numbers.")

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; the values of ``labels`` do not matter."""
        self._check_enough(labels)
        order = streams.generator("split").permutation(len(labels))
        return [sorted_union([part]) for part in np.array_split(order, self.num_clients)]


class NaturalPartition(BaseModel):
    """The clients that the source itself has (writers, roles): all, or some that are drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["natural"] = Field(
        default="natural", description="Keep the clients of the source; only for sources that have their own."
    )
    num_clients: int | None = Field(
        default=None,
        ge=1,
        description="Number of clients, drawn by the seed; all sets of that size are equally likely; null: all.",
    )
    min_samples: int = Field(
        default=0, ge=0, description="Leave out clients with fewer samples (train and test together)."
    )

    def chosen(self, sizes: np.ndarray, streams: RandomStreams) -> np.ndarray:
        """The clients that are kept.

        Args:
            sizes: samples of every client of the source, integers of shape (K,).
            streams: the experiment's randomness; uses the stream ``clients``.

        Returns:
            Ascending positions in ``sizes``, int64.

        Raises:
            DataError: fewer clients than asked for, or none, have enough samples.
        """
        large = np.flatnonzero(sizes >= self.min_samples)
        wanted = len(large) if self.num_clients is None else self.num_clients
        if not len(large) or wanted > len(large):
            least = self.min_samples
            having = f"of {len(sizes)} clients with at least {least} samples" if least else "clients"
            asked = "partition.min_samples" if self.num_clients is None else "partition.num_clients"
            value = self.min_samples if self.num_clients is None else self.num_clients
            raise DataError(
                f"{asked} is {value}, but the data set has only {len(large)} {having}; lower it"
                + (" or partition.min_samples" if self.min_samples and self.num_clients is not None else "")
            )
        if wanted == len(large):
            return large
        return np.sort(streams.generator("clients").choice(large, size=wanted, replace=False))

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """Never succeeds: pooled samples have no clients of their own.

        Raises:
            DataError: always; names the partitions that pooled samples can have.
        """
        raise DataError(
            "partition.name is 'natural', but this data source is pooled and has no clients of its own; choose "
            "another partition, such as 'pathological', 'dirichlet' or 'iid' (`rayfl list partitions`)"
        )


def sorted_union(parts: list[np.ndarray]) -> np.ndarray:
    """The indices of all parts, ascending, int64."""
    return np.sort(np.concatenate(parts)).astype(np.int64, copy=False)


def dealt_classes(
    classes: np.ndarray, num_clients: int, classes_per_client: int, generator: np.random.Generator
) -> list[list[int]]:
    """The distinct classes of every client: consecutive ones of shuffled lists of all classes.

    Args:
        classes: labels that occur, ascending.
        num_clients: number of clients K.
        classes_per_client: how many each gets.
        generator: shuffles the lists.

    Raises:
        DataError: a client would get more classes than there are, or some class would go to nobody.
    """
    if classes_per_client > len(classes):
        raise DataError(
            f"partition.classes_per_client is {classes_per_client}, but the data have only {len(classes)} "
            f"classes; set it to {len(classes)} or less"
        )
    if num_clients * classes_per_client < len(classes):
        raise DataError(
            f"partition.num_clients is {num_clients}: with partition.classes_per_client = {classes_per_client} some of "
            f"the {len(classes)} classes would go to nobody; at least {-(-len(classes) // classes_per_client)} clients "
            "are needed"
        )
    remaining: list[int] = []
    drawn = []
    for _ in range(num_clients):
        held, remaining = remaining[:classes_per_client], remaining[classes_per_client:]
        missing = classes_per_client - len(held)
        if missing:
            shuffled = _shuffle_after(held, missing, classes, generator)
            held, remaining = held + shuffled[:missing], shuffled[missing:]
        drawn.append(held)
    return drawn


def _shuffle_after(held: list[int], count: int, classes: np.ndarray, generator: np.random.Generator) -> list[int]:
    """All classes shuffled, given that none of the first ``count`` is held.

    Distributed as shuffling until that is true, which could take forever with many classes.
    """
    order = generator.permutation(classes)
    if not held:
        return list(order.tolist())
    head = order[~np.isin(order, held)][:count]
    # The first shuffle says something about the order of the others, so they are shuffled afresh.
    tail = generator.permutation(np.setdiff1d(classes, head))
    return [*head.tolist(), *tail.tolist()]
