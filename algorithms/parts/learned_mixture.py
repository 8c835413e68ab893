"""Models mixed element by element of what a client has and what it receives, with weights learned on its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.accumulators import ACCUMULATOR, averaging
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.partial import part
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task

STREAM = ".ala"
"""Suffix of the streams of the pass that learns the weights."""


class LearnedMixture(TrainedNewcomers):
    """A method whose clients begin at (1 - W) a + W w, with a their own and w the received part of the model.

    W in [0, 1], of the shape of a, makes steps of gradient descent on the loss at the mixture.
    """

    weight_lr: float = setting(1.0, "eta", "learning rate of the weights; 0 leaves them at 1", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if context.train.max_grad_norm is not None:
            raise ConfigError(
                f"{type(self).__name__}'s mixing weights make steps of their own, which train.max_grad_norm would clip "
                "with those of the model: set train.max_grad_norm=null"
            )

    async def weights_pass(
        self,
        client: Client,
        own: Tree,
        model: Tree,
        weights: Tree,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> tuple[Tree, float]:
        """Steps of the weights, from those given; nothing else is moved.

        Args:
            client: whose samples are used.
            own: a, by name.
            model: the received model, of which w is the part with the names of a.
            weights: W, by name.
            steps: number of mini-batches; None: whole epochs.
            epochs: default the configured local epochs.

        Returns:
            The weights, and the loss of the last mini-batch.
        """
        like = next(iter(weights.values()))
        trained = await client.train(
            {
                "weights": weights,
                # of the client's own, since a pass in training mode writes to them
                "buffers": part(model, client.task.network.buffer_names),
                "loss": like.new_zeros(()),
            },
            self.mixture_objective,
            frozen={"old": own, "received": part(model, client.task.network.parameter_names)},
            lr=self.weight_lr,
            momentum=0.0,
            weight_decay=0.0,
            groups={"weights": ParameterGroup(bounds=(0.0, 1.0), optimizer="sgd"), "loss": ACCUMULATOR},
            keep_optimizer=False,
            stream=STREAM,
            steps=steps,
            epochs=epochs,
        )
        return trained["weights"], float(trained["loss"])

    @property
    def mixture_objective(self) -> Sum:
        """The loss at the mixture as a function of W, whose last value is kept."""
        return function(self._at_mixture)

    def _at_mixture(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        received = frozen["received"]
        mixed = mixture(frozen["old"], received, trained["weights"])
        value: Tensor = task.loss({**received, **trained.get("buffers", {}), **mixed}, batch)
        return value + averaging(trained["loss"], value, 1.0)


def mixture(own: Tree, received: Tree, weights: Tree) -> Tree:
    """(1 - W) own + W received, exact at 0 and at 1."""
    return {name: torch.lerp(own[name], received[name], weight) for name, weight in weights.items()}
