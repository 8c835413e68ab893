"""What the sections ``task`` of a configuration have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from rayfl.data.images.variations import Variations
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec, Target
from rayfl.metrics import Metric
from rayfl.metrics.changed_inputs import ASKED_BY
from rayfl.models.base import Network
from rayfl.tasks.base import NetworkTask

TARGETS: dict[Target, str] = {
    "class": "a class of each sample",
    "labels": "several labels of each sample",
    "values": "numbers to predict",
    "tokens": "the next token at each position",
    "mask": "a class of each pixel",
    "survival": "the time of an event, or until when it was not seen",
    "preference": "which of two answers is preferred",
    "ranking": "an item that a user chose, among others",
    "nodes": "a class of each node",
    "forecast": "what comes after windows of series",
}
"""What data may say of their samples, in words."""


class TaskSection(BaseModel, ABC):
    """The section ``task``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    learns_from: ClassVar[Target | None] = None
    usual: ClassVar[bool] = True
    """Whether this is what people mean who have such targets; of each kind of targets one task is."""
    views: ClassVar[int] = 1
    """How many changed images a training step sees of each, by the section ``augment``."""

    @property
    def counts_classes(self) -> bool:
        """Returns whether the task must know how many training samples each class has."""
        return False

    @property
    def target(self) -> Target:
        """Returns the kind of targets that the samples must have."""
        assert self.learns_from is not None
        return self.learns_from

    def check(self, spec: InputSpec, dataset: str) -> None:
        """Checks that the data have the task's targets.

        Args:
            spec: of the data.
            dataset: name of the data in messages.

        Raises:
            ConfigError: naming the task that would fit.
        """
        if spec.target != self.target:
            fitting = [one for one in TaskSection.__subclasses__() if one.learns_from == spec.target and one.usual]
            name = fitting[0].model_fields["name"].default
            raise ConfigError(
                f"task: {self.name} learns from {TARGETS[self.target]}, but dataset {dataset!r} has "
                f"{TARGETS[spec.target]}: set task={name}, or choose other data (docs/tasks.md)"
            )

    def task(
        self,
        networks: Sequence[Network],
        spec: InputSpec,
        changes: Sequence[Metric] = (),
        views: Variations | None = None,
        counts: np.ndarray | None = None,
    ) -> NetworkTask:
        """Returns the task, with one candidate for each network.

        Args:
            networks: one per architecture.
            spec: of the data.
            changes: for which kinds of changed samples predictions are scored, too.
            views: how an evaluation changes images, for a task that compares views of them.
            counts: training samples of each class, integers of shape (C,), for a task that :attr:`counts_classes`.

        Raises:
            ConfigError: an option does not fit the data, or the task has no such score.
        """
        return self._made(self.maker_of_changes(spec, changes) if changes else self.maker(spec), networks)

    @staticmethod
    def _made(make: Callable[[Network, Sequence[Any]], NetworkTask], networks: Sequence[Network]) -> NetworkTask:
        return make(networks[0], [make(network, ()) for network in networks] if len(networks) > 1 else ())

    def of_model(self, spec: InputSpec) -> InputSpec:
        """Returns what a model is made for, which the task may widen.

        Args:
            spec: of the data.
        """
        return spec.of_model

    def network_of(self, network: Network, spec: InputSpec, name: str) -> Network:
        """Returns what the task trains of a model's network: by default the network itself.

        Args:
            network: as the section ``model`` makes it.
            spec: of the inputs.
            name: of the model, for messages.

        Raises:
            ModelError: the task cannot have this network.
        """
        return network

    @abstractmethod
    def judged_by(self) -> tuple[Metric, ...]:
        """Returns the task's metrics, the main one first."""

    def maker_of_changes(
        self, spec: InputSpec, changes: Sequence[Metric]
    ) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """As :meth:`maker`, for a task that also scores predictions for changed samples.

        Args:
            spec: of the data.
            changes: the metrics of these.

        Raises:
            ConfigError: the task does not.
        """
        raise ConfigError(
            f"{ASKED_BY[changes[0]]}: {changes[0].label} is measured in task=classification, and task={self.name} has "
            "no such metric: leave it out"
        )

    @abstractmethod
    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """Returns a factory: (network, tasks of all candidates) -> task."""
