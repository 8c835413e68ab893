"""The parts of an experiment that driver and hosts both make from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from rayfl.config.schema import ExperimentConfig
from rayfl.data.assignment import assignment, assignment_hash
from rayfl.data.federated import FederatedDataset
from rayfl.data.opening import open_dataset
from rayfl.engine.client import RoundContext
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams
from rayfl.storage import Storage
from rayfl.tasks import Classification


@dataclass(frozen=True)
class Parts:
    """Data set, task and context of an experiment; equal in every process that makes them.

    Attributes:
        config: the validated configuration.
    """

    config: ExperimentConfig

    @cached_property
    def streams(self) -> RandomStreams:
        """All random streams."""
        return RandomStreams(self.config.seed)

    @cached_property
    def dataset(self) -> FederatedDataset:
        """The clients; samples are read when a client is loaded.

        Raises:
            DataError: when the source cannot be read or divided as asked.
            ConfigError: when source and partition do not go together.
        """
        return open_dataset(self.config, self.streams)

    @cached_property
    def assignment(self) -> pa.Table:
        """Who owns which sample (``rayfl.data.assignment.ASSIGNMENT_SCHEMA``)."""
        return assignment(self.dataset)

    @cached_property
    def partition_hash(self) -> str:
        """SHA-256 of :attr:`assignment`."""
        return assignment_hash(self.assignment)

    @cached_property
    def task(self) -> Classification:
        """What is learned, with the model built for the data set's inputs."""
        networks = self.config.model.networks(self.dataset.spec)
        if len(networks) == 1:
            return Classification(networks[0])
        return Classification(networks[0], [Classification(network) for network in networks])

    @cached_property
    def context(self) -> RoundContext:
        """The context of round 0."""
        train = self.config.train
        return RoundContext(0, train.rounds, self.dataset.num_clients, train, self.streams)

    @property
    def storage(self) -> Storage:
        """The run's folder."""
        path = self.config.storage_path
        return Storage(path if "://" in path else os.path.expanduser(path)).inside(self.config.run_name)

    def cohort(self, round: int) -> list[int]:
        """The clients sampled in a round, ascending; the same for every method."""
        generator = self.streams.generator("sampling", round)
        clients, size = self.dataset.num_clients, self.context.cohort_size
        return sorted(int(c) for c in generator.choice(clients, size=size, replace=False))

    def check(self) -> np.ndarray:
        """Finds what can be found before any actor starts; returns samples by client and split (K, 3).

        Raises:
            RayflError: naming the field, file or model and the fix.
        """
        wanted, available = self.config.train.clients_per_round, self.dataset.num_clients
        if wanted != "all" and wanted > available:
            raise ConfigError(f"train.clients_per_round is {wanted}, but there are only {available} clients")
        algorithm = self.config.algorithm
        if len(self.task.candidates) > 1 and not algorithm.mixes_architectures:
            raise ConfigError(
                f"model.candidates: all clients of {algorithm.name} share one architecture; give a single model"
            )
        algorithm.check(self.task, self.context)
        sizes = self.dataset.sizes()
        algorithm.check_data(self.task, sizes, self.config.holdout.public)
        return sizes
