"""The settings of one local update: those that its method gives, and configured values for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypedDict

from rayfl.engine.optimizers import Groups, ParameterGroup, Rule
from rayfl.engine.settings import TrainConfig


class LocalOptions(TypedDict, total=False):
    """The options of a local update; see :meth:`rayfl.engine.client.Client.train` for each."""

    epochs: int | None
    lr: float | None
    momentum: float | None
    weight_decay: float | None
    steps: int | None
    repeats: int
    groups: Mapping[str, ParameterGroup] | None
    keep_optimizer: bool | Collection[str] | None
    stream: str


@dataclass(frozen=True)
class LocalSettings:
    """The settings of one local update.

    Attributes:
        steps: number of mini-batches.
        repeats: how many consecutive steps use each mini-batch.
        rule: the optimizer's update rule.
        groups: parameter groups, by first key of the trained tree.
        keep_optimizer: whether the optimizer's state persists between updates, or the first keys for which it does.
        stream: suffix of the random streams.
    """

    steps: int
    repeats: int
    rule: Rule
    groups: Groups
    keep_optimizer: bool | Collection[str]
    stream: str

    @classmethod
    def of(  # noqa: D417 - LocalOptions says what the others are
        cls,
        train: TrainConfig,
        round: int,
        samples: int,
        *,
        epochs: int | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        steps: int | None = None,
        repeats: int = 1,
        groups: Mapping[str, ParameterGroup] | None = None,
        keep_optimizer: bool | Collection[str] | None = None,
        stream: str = "",
    ) -> LocalSettings:
        """Returns the settings of a client's update in a round, with the configured values where none are given.

        Args:
            train: the training section of the configuration.
            round: t, 0-indexed; decides on the default learning rate.
            samples: n_k, the client's training samples; decides on the default number of steps.
            epochs: this and the following: see :meth:`rayfl.engine.client.Client.train`.

        Raises:
            MethodError: when ``momentum`` is given for parameters that Adam trains.
        """
        own = ParameterGroup(train.lr_in(round) if lr is None else lr, momentum, weight_decay)
        return cls(
            steps=train.steps_of(samples, epochs) if steps is None else steps,
            repeats=repeats,
            rule=own.applied(train.rule),
            groups=tuple((groups or {}).items()),
            keep_optimizer=train.persist_optimizer if keep_optimizer is None else keep_optimizer,
            stream=stream,
        )
