"""The server in a procedure of its own: public samples, random streams, and the engine on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from rayfl.data.federated import OnDemand
from rayfl.data.images.variations import Variations
from rayfl.data.images.views import Changes
from rayfl.engine.client import Client
from rayfl.engine.client_streams import ClientStreams
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import BatchPlan
from rayfl.engine.updates.local_settings import LocalSettings
from rayfl.engine.updates.requests import SERVER
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import MethodError
from rayfl.examples import Examples
from rayfl.tasks.base import Predictor, Task


class Server(Client):
    """The server during a procedure of its own, which ``clients.on_server`` starts.

    It has the methods of a client: ``train``, ``outputs``, ``initial_model``, ``public``. Its only samples are the
    public ones: pass ``examples`` to ``train``, as :meth:`labelled_public`, or ``steps`` alone. With ``steps`` alone
    every mini-batch is empty, and the objective works on ``draw`` and ``frozen``. Random numbers come from the streams
    of clients, for the client -1. The server is never stacked with others: its steps are the same in all engine modes.

    Attributes:
        state: empty at first, and not kept. To go on with the optimizer of an earlier pass, put into
            ``state["optimizer"]`` what a pass with ``keep_optimizer`` left there, and return it afterwards.
    """

    def __init__(
        self,
        task: Task,
        context: RoundContext,
        device: torch.device,
        public: Callable[[], Tensor] | None,
        labelled: Callable[[], Examples] | None = None,
    ) -> None:
        super().__init__(SERVER, {}, OnDemand(_none), task, context, device, public)
        self._labelled = labelled

    def labelled_public(self) -> Examples:
        """The public samples (``holdout.public``) with their right labels, on the device; no client sees the labels."""
        if self._labelled is None:
            raise RuntimeError("there are no public samples here")
        return self._labelled()

    def publish(self, **predictors: Predictor) -> NoReturn:
        """Raises an error: only clients have rows in the results.

        Raises:
            MethodError: always.
        """
        raise MethodError("the server publishes no predictors: return the model, and let `predictors` make rows of it")

    def _training(self, examples: Examples | None) -> Examples:
        if examples is not None:
            return examples
        return Examples(torch.zeros(0, 1, device=self._device), torch.zeros(0, dtype=torch.int64, device=self._device))

    @property
    def _streams(self) -> ServerStreams:
        return ServerStreams(self.context, self.round, self.id)


class ServerStreams(ClientStreams):
    """The server's random streams of one round."""

    def plan(self, settings: LocalSettings, train: TrainConfig, samples: int) -> BatchPlan:
        """Returns the mini-batches of a pass over n samples, never Poisson samples; empty ones without samples.

        Raises:
            MethodError: when there are neither samples nor a number of steps.
        """
        if samples:
            return self.shuffled(settings, train, samples)
        if not settings.steps:
            raise MethodError(
                "the server's training needs examples=Examples(inputs, targets), or steps=... for an objective that "
                "reads no samples"
            )
        return BatchPlan(torch.zeros(0, dtype=torch.int64), (0,) * (settings.steps * settings.repeats + 1))

    def variations(self, settings: LocalSettings, plan: BatchPlan, views: Changes | None = None) -> Variations | None:
        """Returns changes that are asked for, or the views that a task compares; only clients' images have others."""
        augmentation = self.context.augmentation
        several = augmentation is not None and augmentation.views > 1 and len(plan.order) > 0
        return super().variations(settings, plan, views) if several or views is not None else None

    def private(self, *of_pass: Any) -> None:
        """Returns None: only clients' own samples are private."""


def _none(split: str) -> NoReturn:
    raise MethodError(
        f"the server has no {split} samples: there are the public ones, server.public(), and what it is given"
    )
