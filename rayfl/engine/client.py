"""A client as its method sees it: data, state, random streams, and the engine behind ``await``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.data.federated import Examples
from rayfl.engine.batches import num_steps, plan_batches
from rayfl.engine.requests import GradientRequest, Objective, TrainRequest
from rayfl.engine.settings import TrainConfig
from rayfl.engine.trampoline import Ask
from rayfl.params import Tree, leaves, map_leaves
from rayfl.randomness import RandomStreams
from rayfl.tasks import Predictor, Task

Draw = Callable[[np.random.Generator, int], Tree]
"""``draw(generator, steps)``: a tree of arrays with one entry a step along dimension 0."""

_GRADIENT_BATCH = 256


@dataclass(frozen=True)
class RoundContext:
    """What everybody knows in a round.

    Attributes:
        round: t, 0-indexed. In the evaluation after round t it is t as well.
        rounds: T, how many rounds the experiment has.
        num_clients: K.
        train: the training section of the configuration.
        streams: all random streams.
        final: whether this is the evaluation after the last round.
    """

    round: int
    rounds: int
    num_clients: int
    train: TrainConfig
    streams: RandomStreams
    final: bool = False


class Client:
    """One client during one procedure.

    Attributes:
        id: the client's number, 0..K-1.
        context: round, rounds, training section, streams.
        state: a tree that persists from round to round. Assign new values; never change a tensor in place.
            Changes are kept only if the procedure returns.
        task: what is learned.
        published: predictors made public by :meth:`publish`.
    """

    def __init__(
        self, id: int, state: Tree, examples: Examples, task: Task, context: RoundContext, device: torch.device
    ) -> None:
        self.id = id
        self.state = state
        self.task = task
        self.context = context
        self.published: dict[str, Predictor] = {}
        self._examples = examples
        self._device = device

    @property
    def num_samples(self) -> int:
        """n_k, the client's training samples."""
        return len(self._examples)

    @property
    def round(self) -> int:
        """t, 0-indexed."""
        return self.context.round

    @property
    def lr(self) -> float:
        """eta_t, the learning rate of this round."""
        return self.context.train.lr_in(self.round)

    def num_steps(self, epochs: int | None = None) -> int:
        """Local SGD steps that ``epochs`` (default: the configured local epochs) take on this client."""
        train = self.context.train
        return num_steps(self.num_samples, train.batch_size, train.local_epochs if epochs is None else epochs)

    def initial_model(self) -> Tree:
        """The server's initial model (stream ``init.global``), the same for all."""
        return self._initialized("init.global", -1)

    def fresh_model(self, shared: bool = False) -> Tree:
        """A second initial model (stream ``init.local``), the same each time it is asked for.

        Args:
            shared: one draw for all clients instead of this client's own.
        """
        return self._initialized("init.local", -1 if shared else self.id)

    async def train(
        self,
        trainable: Tree,
        objective: Objective,
        *,
        frozen: Mapping[str, Any] | None = None,
        draw: Draw | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        stream: str = "",
    ) -> Tree:
        """Local SGD from ``trainable`` on ``objective``; returns the trained tree.

        Args:
            trainable: the tree to train, left as it is. A tensor that the objective does not read has a zero
                gradient, so weight decay still moves it: what shall not move belongs into ``frozen``.
            objective: ``(trainable, batch, task, frozen, draw) -> scalar``.
            frozen: tensors the objective reads.
            draw: makes the random numbers of all steps, from the stream ``mix``.
            epochs: default the configured local epochs.
            lr: default the round's learning rate.
            momentum: default the configured momentum.
            stream: suffix of the streams, for a pass other than a round's first (``.finetune``).
        """
        train = self.context.train
        streams, t = self.context.streams, self.round
        plan = plan_batches(
            self.num_samples,
            train.batch_size,
            train.local_epochs if epochs is None else epochs,
            streams.generator(f"batches{stream}", t, self.id),
        )
        draws = None
        if draw is not None:
            dtype = next(leaf.dtype for _, leaf in leaves(trainable))
            numbers = draw(streams.generator(f"mix{stream}", t, self.id), plan.steps)
            draws = map_leaves(lambda a: torch.as_tensor(a, dtype=dtype, device=self._device), numbers)
        request = TrainRequest(
            client=self.id,
            examples=self._examples,
            trainable=trainable,
            frozen=None if frozen is None else map_leaves(self._to_device, frozen),
            objective=objective,
            draws=draws,
            plan=plan,
            lr=self.lr if lr is None else lr,
            momentum=train.momentum if momentum is None else momentum,
            weight_decay=train.weight_decay,
            seed=streams.integer(f"dropout{stream}", t, self.id),
        )
        trained: Tree = await Ask(request)
        return trained

    async def gradient(self, point: Tree, objective: Objective) -> Tree:
        """The gradient of ``objective`` at ``point`` over all of the client's training samples."""
        batch_size = self.context.train.batch_size or self.num_samples
        seed = self.context.streams.integer("dropout.gradient", self.round, self.id)
        request = GradientRequest(self.id, self._examples, point, objective, max(batch_size, _GRADIENT_BATCH), seed)
        result: Tree = await Ask(request)
        return result

    def publish(self, **predictors: Predictor) -> None:
        """Offers models right after local training as rows (phase ``trained``) of the cohort's results."""
        self.published.update(predictors)

    def _initialized(self, stream: str, client: int) -> Tree:
        seed = self.context.streams.integer(stream, client=client)
        return map_leaves(self._to_device, self.task.network.initialize(seed))

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf
