"""Information about a round, for methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.views import Views
from rayfl.data.partitions.stage import NoStages, Staged
from rayfl.engine.updates.cohorts import cohort_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.stragglers import WHOLE, steps_within, work_of
from rayfl.messages.aggregator_section import Aggregator
from rayfl.messages.aggregators import Mean
from rayfl.messages.attack import AttackConfig
from rayfl.messages.compressors import Compression, Compressor, NoCompression, SecureAggregation
from rayfl.messages.privacy import PrivacyConfig
from rayfl.randomness import RandomStreams
from rayfl.valuation.section import Contribution, NoContribution


@dataclass(frozen=True)
class RoundContext:
    """Information about a round that the server and all clients have.

    Attributes:
        round: t, 0-indexed. In the evaluation after round t it is t as well.
        rounds: T, how many rounds the experiment has.
        num_clients: K, of the clients that may take part in training.
        train: the training section of the configuration.
        streams: all random streams.
        final: whether this is the evaluation after the last round.
        augmentation: random augmentation of training images; None without.
        views: of training images, that the method compares (``Algorithm.views``); None for a method without.
        stages: how clients' samples change over rounds.
        asked: the clients that began the round, with those that do not answer; empty where that is not known.
        started: where rounds have no barrier, the round in which a client of the cohort began its local update, by
            client, if it was an earlier one: its model is so much older.
        unseen: how many further clients are held out from training.
        unseen_epochs: local epochs of such a client when it joins; None: those of ``train``.
        privacy: limits of what clients send, and noise.
        moved_norm: C of this round, where it has moved from the first one (``privacy.target_quantile``).
        compression: what clients' messages lose on their way.
        aggregator: what stands for the mean of what clients send.
        attack: what malicious clients do.
        attackers: the malicious clients.
        repeats: how often clients of the round count in its means, of those that count more than once; None where the
            section ``selection`` has nobody count more than once in any round.
        keeps_changes: whether the server keeps how each client has changed the model, for that section.
        contribution: how the clients of the round are valued.
    """

    round: int
    rounds: int
    num_clients: int
    train: TrainConfig
    streams: RandomStreams
    final: bool = False
    augmentation: Augmentation | None = None
    views: Views | None = None
    stages: Staged | NoStages = field(default_factory=NoStages)
    asked: tuple[int, ...] = ()
    started: Mapping[int, int] = field(default_factory=dict)
    unseen: int = 0
    unseen_epochs: int | None = None
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    moved_norm: float | None = None
    compression: Compression = field(default_factory=NoCompression)
    aggregator: Aggregator = field(default_factory=Mean)
    attack: AttackConfig = field(default_factory=AttackConfig)
    attackers: frozenset[int] = frozenset()
    repeats: Mapping[int, int] | None = None
    keeps_changes: bool = False
    contribution: Contribution = field(default_factory=NoContribution)

    @property
    def stage(self) -> int:
        """Returns the round's stage, from 0; 0 where data do not change."""
        return self.stages.stage_of(self.round)

    @property
    def begins_stage(self) -> bool:
        """Returns whether the round is the first one of a stage after the first stage."""
        return self.round > 0 and self.stage != self.stages.stage_of(self.round - 1)

    @property
    def newcomers(self) -> range:
        """Returns the ids of the clients that are held out from training."""
        return range(self.num_clients, self.num_clients + self.unseen)

    @property
    def compressed(self) -> bool:
        """Returns whether messages are compressed."""
        return isinstance(self.compression, Compressor)

    @property
    def secure_sum(self) -> SecureAggregation | None:
        """Returns the section ``compression`` where the server sees sums of messages alone."""
        return self.compression if isinstance(self.compression, SecureAggregation) else None

    @property
    def one_by_one(self) -> bool:
        """Returns whether the server needs the summands of a mean one by one."""
        kept = self.keeps_changes or self.keeps_messages
        return kept or self.attack.on_messages or not isinstance(self.aggregator, Mean)

    @property
    def keeps_messages(self) -> bool:
        """Returns whether the server keeps the messages of a round until it has valued the clients."""
        return not isinstance(self.contribution, NoContribution)

    @property
    def clip_norm(self) -> float | None:
        """C, the norm that messages of the round are clipped to; None without ``privacy``."""
        return self.privacy.clip_norm if self.moved_norm is None else self.moved_norm

    def staleness(self, client: int) -> int:
        """s, how many steps the server has taken since a client of the cohort began; 0 in synchronous rounds."""
        return self.round - self.started.get(client, self.round)

    @property
    def cohort_size(self) -> int:
        """m, how many clients are sampled in a round; the most where that changes, the mean with Poisson sampling."""
        wanted = self.train.clients_per_round
        return self.num_clients if wanted == "all" else min(wanted, self.num_clients)

    @property
    def smallest_cohort(self) -> int:
        """How many clients are sampled in a round at least."""
        if self.train.sampling == "poisson":
            return self.num_clients if self.cohort_size == self.num_clients else 0
        least = self.train.min_clients_per_round
        return self.cohort_size if least is None else min(least, self.cohort_size)

    @property
    def mean_cohort(self) -> float:
        """How many clients are sampled in a round on average."""
        poisson = self.train.sampling == "poisson"
        return self.cohort_size if poisson else (self.smallest_cohort + self.cohort_size) / 2

    def work_of(self, client: int) -> Fraction:
        """Returns the share of its local work that a client does in the round: less than 1 for a straggler.

        Args:
            client: its id; a client that is held out from training, or that has everybody's samples, does all.
        """
        if client >= self.num_clients:
            return WHOLE
        return work_of(self.train, self.streams, self.started.get(client, self.round), client)

    def steps_of(self, client: int, samples: int) -> int:
        """Returns the number of local SGD steps of a client in the round, as :meth:`Client.num_steps` does there.

        Args:
            client: its id.
            samples: n_k.
        """
        return steps_within(self.train.steps_of(samples), self.work_of(client))

    def cohort(self, round: int) -> list[int]:
        """Returns the clients sampled in a round, ascending; the same for every method."""
        train = self.train
        sizes = (train.clients_per_round, train.min_clients_per_round)
        return cohort_of(self.streams, round, self.num_clients, *sizes, train.sampling)
