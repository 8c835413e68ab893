"""The clients of an experiment: opened, divided, held out, attacked and staged as its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rayfl.config.schema import ExperimentConfig
from rayfl.data.backdoor import Backdoor, WithBackdoor
from rayfl.data.federated import FederatedDataset
from rayfl.data.held_out import WithUnseen, held_out
from rayfl.data.hidden_labels import WithHiddenLabels
from rayfl.data.opening import open_dataset
from rayfl.data.partitions.assignment import FilePartition
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.stage import NoStages
from rayfl.data.poisoned import WithWrongLabels
from rayfl.data.staged import WithStages
from rayfl.randomness import RandomStreams


@dataclass(frozen=True)
class ClientsOf:
    """The clients' samples before and after what the configuration does to them.

    Attributes:
        config: the validated configuration.
        streams: the experiment's randomness.
    """

    config: ExperimentConfig
    streams: RandomStreams

    @cached_property
    def dataset(self) -> FederatedDataset:
        """Returns the clients as an experiment has them; see :attr:`rayfl.experiment.parts.Parts.dataset`."""
        attack, stages = self.config.attack, self.config.stages
        found = self.honest
        if self.backdoor is not None:
            found = WithBackdoor(found, self.attackers, self.backdoor, self.streams)
        elif self.attackers and attack.labels != "honest":
            found = WithWrongLabels(found, self.attackers, attack.labels, self.streams)
        if isinstance(stages, NoStages):
            return found
        return WithStages(found, self.true, stages, self.streams, found.num_clients - self.unseen)

    @cached_property
    def honest(self) -> FederatedDataset:
        """Returns the clients as if none were malicious, with the samples of all stages."""
        return self._opened(self.config)

    @cached_property
    def true(self) -> FederatedDataset:
        """Returns them with the true labels of their samples."""
        if not self.config.noise.active:
            return self.honest
        return self._opened(self.config.model_copy(update={"noise": LabelNoise()}))

    def _opened(self, config: ExperimentConfig) -> FederatedDataset:
        opened, share = open_dataset(config, self.streams), config.evaluation.unseen_clients
        if config.labelled.active:
            opened = WithHiddenLabels(opened, config.labelled, self.streams)
        if not share:
            return opened
        partition = self.config.partition
        last = partition.unseen() if isinstance(partition, FilePartition) else 0
        return WithUnseen(opened, held_out(opened.num_clients, share, self.streams, last))

    @cached_property
    def unseen(self) -> int:
        """Returns how many clients are held out from training."""
        return self.honest.unseen if isinstance(self.honest, WithUnseen) else 0

    @cached_property
    def backdoor(self) -> Backdoor | None:
        """Returns what malicious clients have models learn; None where they have no trigger.

        Raises:
            ConfigError: the data have no such trigger, or no such class.
        """
        asked = self.config.attack.backdoor
        return None if asked is None else asked.build(self.honest, len(self.attackers))

    @cached_property
    def attackers(self) -> frozenset[int]:
        """Returns the malicious clients.

        Raises:
            ConfigError: they cannot be chosen as asked.
        """
        return self.config.attack.attackers(self.honest.num_clients - self.unseen, self.streams)
