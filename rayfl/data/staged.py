"""Clients whose samples change from stage to stage (the section ``stages``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import torch

from rayfl.data.federated import Derived, FederatedDataset, OnDemand
from rayfl.data.partitions.arriving import Arriving, ClassStages, DomainStages
from rayfl.data.partitions.drifting import Drifting, RotationStages
from rayfl.data.partitions.joining import ClientStages
from rayfl.data.partitions.stage import Staged
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples, Places
from rayfl.randomness import RandomStreams


class WithStages(Derived):
    """The clients of a data set, with all samples that they ever have; :meth:`at` has those of a stage.

    Args:
        inner: the data set.
        true: the same clients and samples with their true labels, by which classes arrive.
        stages: which samples are there when, and how they change.
        streams: the experiment's randomness.
        training: how many clients, the first ones, may train.

    Raises:
        ConfigError: the samples are none of which a stage of this kind could be made.
    """

    def __init__(
        self, inner: FederatedDataset, true: FederatedDataset, stages: Staged, streams: RandomStreams, training: int
    ) -> None:
        super().__init__(inner)
        _check_kind(inner, stages)
        self.stages, self.streams = stages, streams
        self._true, self._training = true, training
        self._known: dict[int, list[np.ndarray]] = {}
        self.at = lru_cache(maxsize=None)(self._at)  # type: ignore[method-assign]

    @property
    def inner(self) -> FederatedDataset:
        """Returns the clients with all their samples, unchanged."""
        return self._inner

    @property
    def classes(self) -> int:
        """C; 0 where samples have no class."""
        return self.spec.num_classes if self.spec.target == "class" else 0

    def stage_of(self, round: int) -> int:
        """Returns the stage of a round, both from 0."""
        return self.stages.stage_of(round)

    def _at(self, stage: int) -> FederatedDataset:
        if isinstance(self.stages, ClientStages):
            return _Joined(self, stage)
        return _Drifted(self, stage) if isinstance(self.stages, Drifting) else _Arrived(self, stage)

    def arrivals(self, client: int) -> list[np.ndarray]:
        """Returns the stage of each sample of a client, an array for each split."""
        assert isinstance(self.stages, Arriving)
        if client not in self._known:
            if isinstance(self.stages, DomainStages):
                kinds, count = self._domains(client), len(self.domains)
            else:
                kinds, count = self._classes(client), self.classes
            self._known[client] = self.stages.arrivals(kinds, count, self.streams, client)
        return self._known[client]

    def trained_on(self, client: int, stage: int) -> np.ndarray:
        """Returns which of its training samples a client has in a stage, ascending int64."""
        assert isinstance(self.stages, Arriving)
        generator = self.streams.generator("stages.memory", client=client)
        return self.stages.trained_on(self.arrivals(client)[0], self._classes(client)[0], stage, generator)

    def _classes(self, client: int) -> list[np.ndarray]:
        if not self.classes:
            return [np.zeros(count, dtype=np.int64) for count in self._inner.sizes()[client].tolist()]
        labels = self._true.labels(client)
        return [np.asarray(labels[split], dtype=np.int64) for split in SPLITS]

    def _domains(self, client: int) -> list[np.ndarray]:
        assert self.domain is not None
        places = self._inner.places(client)
        return [self.domain[places[split]].astype(np.int64) for split in SPLITS]

    @cached_property
    def concepts(self) -> np.ndarray:
        """Returns the concept of each client in each stage, int64 of shape (K, S)."""
        assert isinstance(self.stages, Drifting)
        return self.stages.concepts(self.num_clients, self.streams)

    @cached_property
    def there(self) -> np.ndarray:
        """Returns which clients are there in which stage, bool of shape (K, S); newcomers are no part of that."""
        assert isinstance(self.stages, ClientStages)
        found = np.ones((self.num_clients, self.stages.count), dtype=np.bool_)
        found[: self._training] = self.stages.there(self._training, self.streams)
        return found

    @cached_property
    def black(self) -> torch.Tensor:
        """Returns what stands for black in each channel."""
        channels = self.spec.shape[0]
        return torch.zeros(channels) if self.preprocess is None else torch.as_tensor(self.preprocess.pixel(0))


class _AtStage(Derived):
    """The clients in one stage.

    Args:
        whole: with the samples of all stages.
        stage: s.
    """

    def __init__(self, whole: WithStages, stage: int) -> None:
        super().__init__(whole.inner)
        self._whole, self._stage = whole, stage


class _Arrived(_AtStage):
    """Those of their samples that have arrived: test and validation samples up to the stage, training samples of it."""

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        return self._sizes.copy()

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([[len(self._there(k, split)) for split in SPLITS] for k in range(self.num_clients)])

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)
        return OnDemand(lambda split: found[split][torch.from_numpy(self._there(client, split))])

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        found = self._inner.labels(client)
        return {split: found[split][self._there(client, split)] for split in SPLITS}

    def places(self, client: int) -> Places:
        """Returns which samples of the source each split of a client holds."""
        found = self._inner.places(client)
        return {split: found[split][self._there(client, split)] for split in SPLITS}

    def tested(self, client: int) -> Examples:
        """Returns a client's test samples of this stage alone."""
        arrivals = self._whole.arrivals(client)[SPLITS.index("test")]
        return self._inner.load(client)["test"][torch.from_numpy(np.flatnonzero(arrivals == self._stage))]

    def _there(self, client: int, split: str) -> np.ndarray:
        if split == "train":
            return self._whole.trained_on(client, self._stage)
        found: np.ndarray = np.flatnonzero(self._whole.arrivals(client)[SPLITS.index(split)] <= self._stage)
        return found


class _Joined(_AtStage):
    """Those who are there with all their samples; the others have none to train on."""

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        sizes = self._inner.sizes().copy()
        sizes[~self._whole.there[:, self._stage], 0] = 0
        return sizes

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)
        return OnDemand(lambda split: found[split][:0] if self._lacks(client, split) else found[split])

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        found = self._inner.labels(client)
        return {split: found[split][:0] if self._lacks(client, split) else found[split] for split in SPLITS}

    def places(self, client: int) -> Places:
        """Returns which samples of the source each split of a client holds."""
        found = self._inner.places(client)
        return {split: found[split][:0] if self._lacks(client, split) else found[split] for split in SPLITS}

    def _lacks(self, client: int, split: str) -> bool:
        return split == "train" and not self._whole.there[client, self._stage]


class _Drifted(_AtStage):
    """All their samples, each client's under its concept of the stage."""

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)

        def read(split: str) -> Examples:
            stages, concept = self._of(client)
            x = stages.changed_inputs(found[split].x, concept, self._whole.black)
            return replace(found[split], x=x, y=torch.from_numpy(self._changed(client, found[split].y.numpy())))

        return OnDemand(read)

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        return {split: self._changed(client, y) for split, y in self._inner.labels(client).items()}

    def tested(self, client: int) -> Examples:
        """Returns a client's test samples as they are in this stage."""
        return self.load(client)["test"]

    def _of(self, client: int) -> tuple[Drifting, int]:
        assert isinstance(self._whole.stages, Drifting)
        return self._whole.stages, int(self._whole.concepts[client, self._stage])

    def _changed(self, client: int, y: np.ndarray) -> np.ndarray:
        stages, concept = self._of(client)
        return stages.changed_labels(y, concept, self._whole.classes)


def _check_kind(dataset: FederatedDataset, stages: Staged) -> None:
    spec, kind = dataset.spec, f"stages.name is {stages.name}"
    if spec.target == "nodes":
        raise ConfigError(
            "stages: a client of this task has one graph, whose nodes do not arrive one by one: leave the section out"
        )
    if isinstance(stages, ClassStages | Drifting) and spec.target != "class":
        raise ConfigError(
            f"{kind}, which is about samples of one class each, but the data set has {spec.words()}: set "
            "stages.name=samples, or leave the section out"
        )
    if isinstance(stages, ClassStages) and stages.count > spec.num_classes:
        raise ConfigError(
            f"stages.count is {stages.count}, but there are only {spec.num_classes} classes to divide: lower it"
        )
    if isinstance(stages, DomainStages):
        if dataset.domain is None:
            raise ConfigError(
                f"{kind}, but these samples are of no domains: choose digit_five, office_caltech, domainnet, "
                "image_folder, or your own function that returns Samples with domains, or another name"
            )
        if stages.count > len(dataset.domains):
            raise ConfigError(
                f"stages.count is {stages.count}, but there are only {len(dataset.domains)} domains to divide "
                f"({', '.join(dataset.domains)}): lower it"
            )
    if isinstance(stages, RotationStages) and (spec.kind != "image" or len(spec.shape) != 3):
        raise ConfigError(
            f"{kind}, but inputs of shape {tuple(spec.shape)} are no images (channels, rows, columns): choose another "
            "name, or leave the section out"
        )
