"""What a client's local update draws from its random streams: mini-batches, augmentation, seeds of noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from rayfl.data.images.variations import Variations
from rayfl.data.images.views import Changes
from rayfl.engine.gradients.example_gradients import of_samples_and_others
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import BatchPlan, joined, plan_batches, poisson_batches, sampling_rate
from rayfl.engine.updates.local_settings import LocalSettings
from rayfl.engine.updates.requests import ExamplePrivacy, Objective
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.stragglers import steps_within
from rayfl.errors import MethodError
from rayfl.examples import Examples


@dataclass(frozen=True)
class ClientStreams:
    """A client's random streams of one round.

    Attributes:
        context: has the streams of all clients and rounds.
        round: t, in which the client began.
        client: its id.
    """

    context: RoundContext
    round: int
    client: int

    def generator(self, purpose: str, settings: LocalSettings) -> np.random.Generator:
        """Returns the generator of a local update for a purpose."""
        return self.context.streams.generator(f"{purpose}{settings.stream}", self.round, self.client)

    def seed(self, purpose: str, settings: LocalSettings) -> int:
        """Returns the seed of a local update's counter-based random numbers for a purpose."""
        return self.context.streams.integer(f"{purpose}{settings.stream}", self.round, self.client)

    def plan(self, settings: LocalSettings, train: TrainConfig, samples: int) -> BatchPlan:
        """Returns the mini-batches of a pass over n samples; Poisson samples where samples are to be private."""
        if not self.context.privacy.of_examples:
            return self.shuffled(settings, train, samples)
        generator = self.generator("batches", settings)
        return poisson_batches(samples, train.batch_size, settings.steps, generator, settings.repeats)

    def shuffled(self, settings: LocalSettings, train: TrainConfig, samples: int) -> BatchPlan:
        """Returns shuffled mini-batches of a pass over n samples."""
        generator = self.generator("batches", settings)
        if not train.shuffle:  # the first permutation is the same in all passes and rounds
            generator = self.context.streams.generator("batches", client=self.client)
        ends = {"drop_last": train.drop_last, "shuffle": train.shuffle}
        return plan_batches(samples, train.batch_size, settings.steps, generator, settings.repeats, **ends)

    def paired(self, first: int, second: int, ratio: int, epochs: int | None, work: Fraction, stream: str) -> BatchPlan:
        """Returns mini-batches of two kinds of samples; see :meth:`rayfl.engine.client.Client.paired_batches`.

        Args:
            first: how many samples of the first kind there are.
            second: how many of the second.
            ratio: how many of the second kind a mini-batch has for each of the first.
            epochs: over the second kind; None: the configured ones.
            work: the share of the steps that a straggler takes.
            stream: suffix of the streams ``batches`` and ``batches.unlabelled``.
        """
        train = self.context.train
        wide = train if train.batch_size is None else train.model_copy(update={"batch_size": ratio * train.batch_size})
        steps = steps_within(wide.steps_of(second, epochs), work)
        ends = {"drop_last": train.drop_last, "shuffle": train.shuffle}

        def shuffler(name: str) -> np.random.Generator:
            if not train.shuffle:  # see above
                return self.context.streams.generator(name, client=self.client)
            return self.context.streams.generator(f"{name}{stream}", self.round, self.client)

        return joined(
            plan_batches(first, train.batch_size, steps, shuffler("batches"), **ends),
            plan_batches(second, wide.batch_size, steps, shuffler("batches.unlabelled"), **ends),
            first,
        )

    def variations(self, settings: LocalSettings, plan: BatchPlan, views: Changes | None = None) -> Variations | None:
        """Returns the random changes of the plan's images; None without any.

        Args:
            settings: of the pass.
            plan: its mini-batches.
            views: the changes; None: those of the section ``augment``.
        """
        changes = self.context.augmentation if views is None else views
        if changes is None:
            return None
        return Variations.of_steps(changes, plan.bounds, settings.repeats, self.generator("augment", settings))

    def viewed(self, examples: Examples) -> bool:
        """Returns whether a task compares views of these samples, which are images and no other inputs."""
        augmentation, x = self.context.augmentation, examples.x
        return (
            augmentation is not None and augmentation.views > 1 and x.dim() == 4 and x.shape[2:] == augmentation.sides
        )

    def views_of(self, examples: Examples) -> Examples:
        """Returns samples with the views that a task compares (stream ``augment.gradient``), or as they are."""
        augmentation = self.context.augmentation
        if augmentation is None or not self.viewed(examples):
            return examples
        generator = self.context.streams.generator("augment.gradient", self.round, self.client)
        drawn = Variations(augmentation, augmentation.draw(generator, len(examples)))
        x, y = drawn.to(examples.x.device).applied(examples.x, examples.y)
        return replace(examples, x=x, y=y)

    def private(
        self,
        settings: LocalSettings,
        plan: BatchPlan,
        samples: int,
        objective: Objective,
        usual: bool,
        noised: list[tuple[int, int]],
    ) -> ExamplePrivacy | None:
        """Returns how a pass over n samples limits what it says about each; None if it does not.

        Args:
            settings: of the pass.
            plan: its mini-batches.
            samples: n.
            objective: of the pass.
            usual: whether it trains on the client's own samples, by the section ``train``.
            noised: the steps on a mini-batch, and the mini-batches, of the procedure's earlier passes; this one is
                added.

        Raises:
            MethodError: when epsilon would not be that of the pass.
        """
        privacy, size = self.context.privacy, self.context.train.batch_size
        if privacy.example_clip_norm is None:
            return None
        if not usual:
            raise MethodError(
                "privacy.example_clip_norm: epsilon is that of steps on a client's own samples by the section train, "
                "and this pass has `examples` or `settings` of its own"
            )
        of_samples_and_others(objective)  # refuses what has no gradients of single samples
        expected = samples * sampling_rate(samples, size) if samples else 1.0
        # no two passes may have the same noise, even if their method gives them the same stream
        purpose = f"privacy.example{settings.stream}.{len(noised)}"
        noised.append((settings.repeats, plan.steps // settings.repeats))
        seed = self.context.streams.integer(purpose, self.round, self.client)
        return ExamplePrivacy(privacy.example_clip_norm, privacy.example_noise_multiplier, expected, seed)
