"""Partitions by groups of classes: primary classes per fold, and clusters that are cut into clients of random size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.partitions.base import SizedPartition, SkewedPartition, sorted_union
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams


class PrimaryClassesPartition(SizedPartition):
    """Clients in folds, whose samples are mostly of the fold's own classes (FLOCO's "5-Fold"; Huang et al., 2021).

    The classes are cut into ``num_folds`` consecutive groups; client k belongs to fold k mod F. All clients have
    floor(N / K) samples. ``mode="excluding"`` takes ``primary_share`` of them from the fold's classes and the rest
    from the others; ``mode="including"`` spreads the rest over all classes (the published codes of FedPAC and FLOCO).
    Samples are drawn without replacement; those that no client needs are left out.
    """

    name: Literal["primary_classes"] = Field(
        default="primary_classes", description="Most samples of a client from the classes of its fold."
    )
    num_folds: int = Field(default=5, ge=1, description="Number of folds F.")
    primary_share: float = Field(default=0.8, gt=0, le=1, description="Share of samples by the fold's classes.")
    mode: Literal["excluding", "including"] = Field(
        default="excluding", description="Whether the other samples leave out the fold's classes or include them."
    )

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class; some samples may go to nobody.

        Raises:
            DataError: there are fewer classes than folds, or no others than the fold's; or a class has too few samples.
        """
        self._check_enough(labels)
        if self.num_folds == 1 and self.mode == "excluding" and self.primary_share < 1:
            raise DataError(
                f"partition.num_folds is 1, so that there are no other classes for {1 - self.primary_share:.0%} of the "
                "samples, which would go to nobody: set partition.primary_share=1 or partition.mode=including"
            )
        classes, totals = np.unique(labels, return_counts=True)
        if self.num_folds > len(classes):
            raise DataError(
                f"partition.num_folds is {self.num_folds}, but there are only {len(classes)} classes; lower it"
            )
        counts = self.counts(len(labels) // self.num_clients, len(classes))
        short = np.flatnonzero(counts.sum(0) > totals)
        if short.size:
            label = int(short[0])
            raise DataError(
                f"partition.name is primary_classes, but class {classes[label]} has {totals[label]} samples where "
                f"{counts[:, label].sum()} are needed: the data are not balanced enough; change partition.primary_share"
            )
        generator = streams.generator("split")
        parts: list[list[np.ndarray]] = [[] for _ in range(self.num_clients)]
        for position, label in enumerate(classes):
            samples = generator.permutation(np.flatnonzero(labels == label))
            for client, chunk in enumerate(np.split(samples, np.cumsum(counts[:, position]))[:-1]):
                parts[client].append(chunk)
        return [np.sort(np.concatenate(chunks)) for chunks in parts]

    def counts(self, size: int, num_classes: int) -> np.ndarray:
        """Samples by client and class, int64 of shape (K, classes); each row sums to ``size``."""
        folds = np.array_split(np.arange(num_classes), self.num_folds)
        counts = np.zeros((self.num_clients, num_classes), dtype=np.int64)
        primary = round(self.primary_share * size)
        for client in range(self.num_clients):
            own = folds[client % self.num_folds]
            others = np.setdiff1d(np.arange(num_classes), own) if self.mode == "excluding" else np.arange(num_classes)
            turn = client // self.num_folds
            counts[client, own] += _spread(primary, len(own), turn)
            counts[client, others] += _spread(size - primary, len(others), turn)
        return counts


class ClassBlocksPartition(SkewedPartition):
    """Consecutive classes for groups of clients: PFLlib's pathological setting (Zhang et al., 2025, published code).

    The first s classes go to the first g = ceil(K s / C) clients, the next s classes to the next g, and so on. Samples
    of a class are dealt in the order of the data set. With ``sizes="unbalanced"`` every client of a group but the last
    gets a number drawn from max(n_c / g / 10, ``min_samples`` / C) to n_c / g of them, the last one all the rest.
    """

    name: Literal["class_blocks"] = Field(
        default="class_blocks", description="Consecutive classes for groups of clients (PFLlib's pathological setting)."
    )
    classes_per_client: int = Field(ge=1, description="Number of consecutive classes s that each client holds.")
    sizes: Literal["unbalanced", "balanced"] = Field(
        default="unbalanced", description="Whether the clients of a group get random or equal parts of a class."
    )
    min_samples: int = Field(
        default=40,
        ge=1,
        description="Unbalanced: a client's part of a class is at least this divided by the number of classes.",
    )

    def divide(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """See the base class.

        Raises:
            DataError: a class would go to nobody, or has too few samples for its clients.
        """
        classes = np.unique(labels)
        group, wide = -(-self.num_clients * self.classes_per_client // len(classes)), self.classes_per_client
        if wide > len(classes) or -(-self.num_clients // group) < -(-len(classes) // wide):
            raise DataError(
                f"partition.classes_per_client is {wide} and partition.num_clients {self.num_clients}: groups of "
                f"{group} clients with {wide} classes each do not hold the data's {len(classes)} classes; choose "
                "classes_per_client as a divisor of the number of classes, and num_clients as a multiple of the number "
                "of groups"
            )
        generator = streams.generator("split")
        parts: list[list[np.ndarray]] = [[] for _ in range(self.num_clients)]
        for position, label in enumerate(classes):
            first = position // wide * group
            holders = range(first, min(first + group, self.num_clients))
            samples = np.flatnonzero(labels == label)
            counts = self._counts(len(samples), len(holders), len(classes), generator)
            if counts is None:
                raise DataError(
                    f"partition.num_clients is {self.num_clients}: class {label} has {len(samples)} samples for the "
                    f"{len(holders)} clients that hold it; lower num_clients, classes_per_client or min_samples"
                )
            for client, chunk in zip(holders, np.split(samples, np.cumsum(counts)), strict=True):
                parts[client].append(chunk)
        return [sorted_union(chunks) for chunks in parts]

    def _counts(
        self, samples: int, holders: int, num_classes: int, generator: np.random.Generator
    ) -> np.ndarray | None:
        """Samples of all holders of a class but the last; None where there are too few."""
        equal = samples / holders
        if self.sizes == "balanced" or holders == 1:
            return np.full(holders - 1, int(equal)) if samples >= holders else None
        least = max(1, int(max(equal / 10, self.min_samples / num_classes)))
        return generator.integers(least, int(equal), size=holders - 1) if least < int(equal) else None


class DomainsPartition(BaseModel):
    """A group of clients for each domain of the data: shift of features (FedBN, Li et al., 2021).

    The samples of a domain are dealt at random, in near-equal numbers, to the clients of its group.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["domains"] = Field(
        default="domains", description="A group of clients for each domain; for data sets that have domains."
    )
    clients_per_domain: int = Field(default=1, ge=1, description="Number of clients of each domain.")
    samples_per_client: int | None = Field(
        default=None,
        ge=1,
        description="Most samples of a client; others are left out (FedBN takes a tenth of each domain); null: all.",
    )

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """The samples of every client, domain after domain: sorted, disjoint int64 arrays.

        Args:
            labels: the number of each sample's domain, integers of shape (N,).
            streams: the experiment's randomness; uses the stream ``split``.

        Raises:
            DataError: a domain has fewer samples than clients.
        """
        generator = streams.generator("split")
        parts = []
        for domain in np.unique(labels):
            samples = generator.permutation(np.flatnonzero(labels == domain))
            if len(samples) < self.clients_per_domain:
                raise DataError(
                    f"partition.clients_per_domain is {self.clients_per_domain}, but a domain has only {len(samples)} "
                    "samples; lower it"
                )
            dealt = np.array_split(samples, self.clients_per_domain)
            parts += [np.sort(part[: self.samples_per_client]) for part in dealt]
        return parts

    def names(self, domains: Sequence[str]) -> list[str]:
        """The clients' names, given those of the domains."""
        if self.clients_per_domain == 1:
            return list(domains)
        return [f"{domain}-{client}" for domain in domains for client in range(self.clients_per_domain)]


class ClassGroupsPartition(BaseModel):
    """Classes dealt to groups; each group's samples are cut into clients of random size (SuPerFed, arXiv version).

    For EMNIST ByClass ``kinds=(10, 26, 26)`` deals digits, upper and lower case to five groups separately; for
    TinyImageNet ten groups of 20 classes. How many clients there are follows from the sizes drawn. What is left of a
    group when the next size exceeds it is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["class_groups"] = Field(
        default="class_groups", description="Deal classes to groups, cut every group into clients of random size."
    )
    num_groups: int = Field(default=5, ge=1, description="Number of groups.")
    kinds: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="Numbers of consecutive labels dealt separately, such as (10, 26, 26); null: all together.",
    )
    min_size: int = Field(default=100, ge=1, description="Smallest size of a client.")
    max_size: int = Field(default=800, ge=1, description="Largest size of a client.")

    @model_validator(mode="after")
    def _ordered(self) -> ClassGroupsPartition:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size ({self.min_size}) must not exceed max_size ({self.max_size})")
        return self

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """The samples of every client: sorted, disjoint int64 arrays of ``min_size`` to ``max_size`` indices.

        Args:
            labels: labels of all samples, integers of shape (N,).
            streams: the experiment's randomness; uses the stream ``split``.

        Raises:
            DataError: ``kinds`` do not add up to the number of classes, or no group is large enough for a client.
        """
        generator = streams.generator("split")
        parts: list[np.ndarray] = []
        for group in self.groups(int(labels.max()) + 1, generator):
            samples = generator.permutation(np.flatnonzero(np.isin(labels, group)))
            while True:
                size = int(generator.integers(self.min_size, self.max_size, endpoint=True))
                if size > len(samples):
                    break
                parts.append(np.sort(samples[:size]))
                samples = samples[size:]
        if not parts:
            raise DataError(
                f"partition.min_size is {self.min_size}: no group has enough samples for a client; lower it"
            )
        return parts

    def groups(self, num_classes: int, generator: np.random.Generator) -> list[np.ndarray]:
        """The classes of every group: each kind is shuffled and dealt in near-equal numbers."""
        kinds = self.kinds or (num_classes,)
        if sum(kinds) != num_classes:
            raise DataError(f"partition.kinds {kinds} add up to {sum(kinds)}, but there are {num_classes} classes")
        groups: list[list[np.ndarray]] = [[] for _ in range(self.num_groups)]
        first = 0
        for kind in kinds:
            hands = np.array_split(generator.permutation(np.arange(first, first + kind)), self.num_groups)
            # Who gets one more is random, kind by kind.
            for group, hand in zip(generator.permutation(self.num_groups), hands, strict=True):
                groups[group].append(hand)
            first += kind
        return [np.sort(np.concatenate(hands)) for hands in groups]


def _spread(count: int, places: int, turn: int) -> np.ndarray:
    """``count`` over ``places`` in near-equal numbers; whose turn it is to get one more goes around."""
    if places == 0:
        return np.zeros(0, dtype=np.int64)
    each, more = divmod(count, places)
    extra = (np.arange(more) + turn * more) % places
    spread = np.full(places, each, dtype=np.int64)
    spread[extra] += 1
    return spread
