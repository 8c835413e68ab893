"""The parts of an experiment that driver and hosts both make from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from torch import Tensor

from rayfl.config.beginning import branch_of
from rayfl.config.schema import ExperimentConfig
from rayfl.data.backdoor import Backdoor
from rayfl.data.federated import FederatedDataset
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.variations import Variations
from rayfl.data.partitions.assignment import assignment, assignment_hash
from rayfl.data.partitions.stage import NoStages
from rayfl.data.partitions.stats import class_counts
from rayfl.data.sources.official import OfficialTest, open_official_test
from rayfl.engine.round_context import RoundContext
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.examples import InputSpec
from rayfl.experiment.changed_images import augmentation_of, views_of
from rayfl.experiment.checking import check_parts
from rayfl.experiment.checks import check_server
from rayfl.experiment.clients import ClientsOf
from rayfl.experiment.copies import copy_of
from rayfl.experiment.learned import task_of
from rayfl.experiment.simulated import schedule_of
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree, leaves, num_bytes
from rayfl.randomness import RandomStreams
from rayfl.selection.strategies import Uniform
from rayfl.selection.strategy import Strategy
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage, absolute
from rayfl.system.buffered import BufferedSchedule
from rayfl.system.config import NoSystem
from rayfl.system.devices import Device, make_devices
from rayfl.system.schedule import Clock, Schedule
from rayfl.tasks.base import NetworkTask


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
        """The clients; samples are read when a client is loaded. Those held out from training are the last.

        Raises:
            DataError: when the source cannot be read or divided as asked.
            ConfigError: when source and partition do not go together, or no client can be held out as asked.
        """
        return self._clients.dataset

    def dataset_in(self, round: int) -> FederatedDataset:
        """Returns the clients with the samples that they have in a round (t, 0-indexed); see ``stages``."""
        return self.dataset.at(self.dataset.stage_of(round))

    @cached_property
    def _clients(self) -> ClientsOf:
        return ClientsOf(self.config, self.streams)

    @property
    def backdoor(self) -> Backdoor | None:
        """Returns what malicious clients have models learn; None where they have no trigger.

        Raises:
            ConfigError: the data have no such trigger, or no such class.
        """
        return self._clients.backdoor

    @property
    def attackers(self) -> frozenset[int]:
        """Returns the malicious clients.

        Raises:
            ConfigError: they cannot be chosen as asked.
        """
        return self._clients.attackers

    @cached_property
    def num_clients(self) -> int:
        """Returns how many clients may take part in training."""
        return self._clients.honest.num_clients - self.num_unseen

    @property
    def num_unseen(self) -> int:
        """Returns how many clients are held out from training."""
        return self._clients.unseen

    @property
    def sizes(self) -> np.ndarray:
        """Returns samples by client and split (K, 3); of training samples those that the method learns from."""
        sizes = self.dataset.sizes()
        if self.config.algorithm.learns_unlabelled:
            sizes = sizes + np.array([1, 0, 0]) * self.dataset.unlabelled_sizes()[:, np.newaxis]
        return sizes

    @cached_property
    def assignment(self) -> pa.Table:
        """Returns who owns which sample (``rayfl.data.partitions.assignment.ASSIGNMENT_SCHEMA``)."""
        return assignment(self.dataset, self.num_unseen)

    @cached_property
    def partition_hash(self) -> str:
        """SHA-256 of :attr:`assignment`."""
        return assignment_hash(self.assignment)

    @property
    def model_spec(self) -> InputSpec:
        """What models are made for."""
        return self.config.task.of_model(self.dataset.spec)

    @cached_property
    def task(self) -> NetworkTask:
        """Returns what is learned, with the model built for the data set's inputs.

        Raises:
            ConfigError: the data do not say what the task learns from.
            ModelError: the model does not fit the inputs.
        """
        counts = None
        if self.config.task.counts_classes:
            # by true classes: wrong labels would make rare ones frequent
            counts = class_counts(self._clients.true, self.num_clients)
        return task_of(self, counts)

    @cached_property
    def input_attack(self) -> InputAttack | None:
        """Returns what changes samples to mislead each model when they are scored once more; None: nothing.

        Raises:
            ConfigError: the data have no inputs that can be changed a little.
        """
        asked = self.config.evaluation.adversarial
        return None if asked is None else asked.build(self.dataset)

    @cached_property
    def evaluation_views(self) -> Variations | None:
        """Returns how evaluations change images, of a task that compares views of them; else None."""
        if self.config.task.views == 1 or self.augmentation is None:
            return None
        return Variations.of_evaluation(self.augmentation, self.streams.generator("views"))

    @cached_property
    def context(self) -> RoundContext:
        """The context of round 0."""
        train, selection = self.config.train, self.config.selection
        return RoundContext(
            0,
            train.rounds,
            self.num_clients,
            train,
            RandomStreams(self.config.seed, branch=branch_of(self.config.init, self.config.privacy)),
            augmentation=self.augmentation,
            stages=self.config.stages,
            views=views_of(self.config, self.dataset),
            unseen=self.num_unseen,
            unseen_epochs=self.config.evaluation.unseen_epochs,
            privacy=self.config.privacy,
            compression=self.config.compression,
            aggregator=self.config.aggregator,
            attack=self.config.attack,
            attackers=self.attackers,
            repeats={} if isinstance(selection, Strategy) and selection.repeats else None,
            keeps_changes=isinstance(selection, Strategy) and selection.needs_updates,
            contribution=self.config.contribution,
        )

    @cached_property
    def augmentation(self) -> Augmentation | None:
        """Returns how training images are changed at random.

        Raises:
            ConfigError: when the inputs are no images.
        """
        return augmentation_of(self.config, self.dataset)

    @cached_property
    def official_test(self) -> OfficialTest:
        """The official test part of the data set.

        Raises:
            ConfigError: when the source has none, or the clients have its samples.
            DataError: when it cannot be read or does not fit the clients' samples.
        """
        source = self.config.dataset.aimed_at(self.config.task.target)
        return open_official_test(source, self.dataset, self.streams, self.config.long_tail)

    def initial_server(self) -> Tree:
        """The server's tree before round 0, without what stays with the clients.

        Raises:
            MethodError: the method's ``init`` returns something else than a tree.
        """
        norm = PrivateNorm(self.task.network, self.config.train.private_norm, self.streams)
        made = self.config.algorithm.init(self.task, self.context)
        check_server(made, self.config.algorithm.init)
        return norm.withheld(made)

    @cached_property
    def summed(self) -> int:
        """How many numbers a client's message has at most, where epsilon depends on it; else 0."""
        if not self.config.privacy.distributed:
            return 0
        found = leaves(self.config.algorithm.summed(self.initial_server()))
        return sum(leaf.numel() for _, leaf in found if isinstance(leaf, Tensor))

    @property
    def storage(self) -> Storage:
        """The run's folder."""
        return Storage(absolute(self.config.storage_path)).inside(self.config.run_name)

    @property
    def copy(self) -> Storage | None:
        """The folder with copies of the run's files; None where it has none."""
        return copy_of(self.storage, self.config.storage, self.config.run_name)

    @property
    def commits(self) -> CommitStore:
        """The run's commits."""
        return CommitStore(self.storage, self.copy)

    def cohort(self, round: int) -> list[int]:
        """The clients sampled in a round, of those that have samples then; ascending, the same for every method."""
        able = self.able(round)
        return [able[place] for place in replace(self.context, num_clients=len(able)).cohort(round)]

    def able(self, round: int) -> Sequence[int]:
        """Returns the clients that have training samples in a round, ascending; all where data do not change."""
        if self.samples_in is None:
            return range(self.num_clients)
        return np.flatnonzero(self.samples_in(round)[: self.num_clients]).tolist()

    @cached_property
    def samples_in(self) -> Callable[[int], np.ndarray] | None:
        """Returns what gives all clients' training samples n_k in a round, (K,); None where they do not change."""
        if isinstance(self.config.stages, NoStages):
            return None
        return lambda round: self.dataset_in(round).sizes()[:, 0]

    def evaluated(self, rounds_completed: int) -> list[int] | None:
        """Returns the clients that are scored after a number of rounds, ascending; the same for every method.

        None stands for all clients. Malicious ones are never scored.
        """
        size = self.config.evaluation.clients
        if size == "all" or rounds_completed == self.config.train.rounds:
            return self.everybody
        honest = self.honest(range(self.num_clients))
        return [honest[i] for i in self.streams.drawn("evaluated", rounds_completed, len(honest), size)]

    @property
    def everybody(self) -> list[int] | None:
        """Returns the clients of an evaluation of all, ascending; None for all there are."""
        return self.honest(range(self.num_clients)) if self.attackers else None

    def honest(self, clients: Iterable[int]) -> list[int]:
        """Returns the clients that are not malicious, in their order."""
        return [client for client in clients if client not in self.attackers]

    @cached_property
    def devices(self) -> list[Device]:
        """The clients' simulated devices; empty without a simulated system.

        Raises:
            ConfigError: when the section ``system`` does not fit the clients.
            DataError: when a trace cannot be read.
        """
        system = self.config.system
        return [] if isinstance(system, NoSystem) else make_devices(system, self.num_clients, self.streams)

    @cached_property
    def schedule(self) -> Schedule | None:
        """Returns who takes part in which round on simulated devices; None where all that are sampled do."""
        known, others = self.dataset.sizes()[:, 0], self.dataset.unlabelled_sizes()
        return schedule_of(self.config, self.devices, known, others, self.context)

    @property
    def chosen(self) -> bool:
        """Returns whether who takes part in a round depends on more than the seed, so that it has to be recorded."""
        changing = self.schedule is not None or self.config.stages.active
        return changing or not isinstance(self.config.selection, Uniform)

    @property
    def buffered(self) -> bool:
        """Returns whether rounds have no barrier."""
        return isinstance(self.schedule, BufferedSchedule)

    def first_clock(self, server: Tree) -> Clock:
        """The virtual time before round 0, when no message has been sent yet whose length is known.

        Args:
            server: the tree before round 0.
        """
        size = num_bytes(self.config.algorithm.sent(server))
        return Clock(0, size, size)

    def check(self) -> np.ndarray:
        """Finds what can be found before any actor starts; returns samples by client and split (K, 3).

        Raises:
            RayflError: naming the field, file or model and the fix.
        """
        return check_parts(self)
