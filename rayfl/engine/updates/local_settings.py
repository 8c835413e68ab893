"""The settings of one local update: those that its method gives, and configured values for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypedDict

from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.stragglers import WHOLE, steps_within
from rayfl.errors import MethodError
from rayfl.optimization.optimizers import Groups, ParameterGroup, Rule
from rayfl.params import Tree


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
        groups: parameter groups, by first key (or path) of the trained tree.
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
        work: Fraction = WHOLE,
    ) -> LocalSettings:
        """Returns the settings of a client's update in a round, with the configured values where none are given.

        Args:
            train: the training section of the configuration.
            round: t, 0-indexed; decides on the default learning rate.
            samples: n_k, the client's training samples; decides on the default number of steps.
            work: the share of the epochs' steps that a straggler takes.
            epochs: this and the others: see :meth:`rayfl.engine.client.Client.train`.

        Raises:
            MethodError: when ``momentum`` is given for parameters that Adam trains.
        """
        own = ParameterGroup(train.lr_in(round) if lr is None else lr, momentum, weight_decay)
        return cls(
            steps=steps_within(train.steps_of(samples, epochs), work) if steps is None else steps,
            repeats=repeats,
            rule=own.applied(train.rule),
            groups=tuple((groups or {}).items()),
            keep_optimizer=train.persist_optimizer if keep_optimizer is None else keep_optimizer,
            stream=stream,
        )

    def check(self, trainable: Tree) -> None:
        """Checks that the tree has what parameter groups and the kept optimizer name.

        Raises:
            MethodError: when it lacks something.
        """
        keys, kept = [key for key, _ in self.groups], self.keep_optimizer
        wrong = {"groups": [key for key in keys if not _is_there(trainable, key)]}
        wrong["keep_optimizer"] = [] if isinstance(kept, bool) else [key for key in kept if key not in trainable]
        for option, names in wrong.items():
            if names:
                paths = "" if option == "keep_optimizer" else " or path"
                raise MethodError(
                    f"{option} names {', '.join(map(repr, names))}, which is no first key{paths} of what is trained: "
                    f"there are {', '.join(map(repr, trainable))}"
                )


def _is_there(tree: Any, path: str) -> bool:
    """Returns whether a tree has a tensor or tree at a path."""
    for key in path.split("/"):
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True
