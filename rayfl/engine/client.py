"""A client as its method sees it: data, state, random streams, and the engine behind ``await``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.augment import Augmentation, Variations
from rayfl.engine.batches import BatchPlan, num_steps, plan_batches
from rayfl.engine.optimizers import Kept, ParameterGroup, Rule
from rayfl.engine.requests import GradientRequest, Objective, OutputRequest, TrainRequest
from rayfl.engine.settings import TrainConfig
from rayfl.engine.tasks import Predictor, Task
from rayfl.engine.trampoline import Ask
from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.params import Tree, map_leaves
from rayfl.randomness import RandomStreams

Draw = Callable[[np.random.Generator, int], Tree]
"""``draw(generator, steps)``: a tree of arrays with one entry a step along dimension 0."""

_LARGE_BATCH = 256


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
        augmentation: how training images are changed at random; None: not at all.
        started: where rounds have no barrier, the round in which a client of the cohort began its local update, by
            client, if it was an earlier one: its model is so much older.
    """

    round: int
    rounds: int
    num_clients: int
    train: TrainConfig
    streams: RandomStreams
    final: bool = False
    augmentation: Augmentation | None = None
    started: Mapping[int, int] = field(default_factory=dict)

    def staleness(self, client: int) -> int:
        """s, how many steps the server has taken since a client of the cohort began; 0 in synchronous rounds."""
        return self.round - self.started.get(client, self.round)

    @property
    def cohort_size(self) -> int:
        """m, how many clients are sampled in a round."""
        wanted = self.train.clients_per_round
        return self.num_clients if wanted == "all" else min(wanted, self.num_clients)


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
        self,
        id: int,
        state: Tree,
        examples: Mapping[str, Examples],
        task: Task,
        context: RoundContext,
        device: torch.device,
        public: Callable[[], Tensor] | None = None,
    ) -> None:
        self.id = id
        self.state = state
        self.task = task
        self.context = context
        self.published: dict[str, Predictor] = {}
        self._examples = examples
        self._device = device
        self._public = public

    @property
    def num_samples(self) -> int:
        """n_k, the client's training samples."""
        return len(self._examples["train"])

    @property
    def round(self) -> int:
        """t, 0-indexed: the round in which the client began, which sets its learning rate and random numbers."""
        return self.context.round - self.staleness

    @property
    def staleness(self) -> int:
        """s, how many steps the server has taken since the client began; 0 in synchronous rounds."""
        return self.context.staleness(self.id)

    @property
    def lr(self) -> float:
        """eta_t, the learning rate of the round in which the client began."""
        return self.context.train.lr_in(self.round)

    def examples(self, split: str = "train") -> Examples:
        """The client's samples of a split (``train`` or ``validation``), on the device."""
        return self._examples[split]

    def public(self) -> Tensor:
        """The unlabelled samples that belong to no client (``holdout.public``), on the device; the same for all."""
        if self._public is None:
            raise RuntimeError("there are no public samples here")
        return self._public()

    def num_steps(self, epochs: int | None = None, samples: int | None = None) -> int:
        """Local SGD steps of some epochs.

        Args:
            epochs: default the configured local epochs.
            samples: how many training samples there are; default the client's own.
        """
        return self.context.train.steps_of(self.num_samples if samples is None else samples, epochs)

    def initial_model(self, task: Task | None = None) -> Tree:
        """The server's initial model (stream ``init.global``), the same for all.

        Args:
            task: the architecture, one of ``client.task.candidates``; default the client's task.
        """
        return self._initialized("init.global", -1, task)

    def fresh_model(self, shared: bool = False) -> Tree:
        """A second initial model (stream ``init.local``), the same each time it is asked for.

        Args:
            shared: one draw for all clients instead of this client's own.
        """
        return self._initialized("init.local", -1 if shared else self.id)

    def batches(
        self, *, epochs: int | None = None, steps: int | None = None, repeats: int = 1, stream: str = ""
    ) -> BatchPlan:
        """Which samples make which mini-batch in :meth:`train`, given the same arguments.

        For values that a method has for each sample: ``draw`` brings those of a step's samples to the objective, so
        that they stay right where samples are augmented.
        """
        wanted = self.num_steps(epochs) if steps is None else steps
        generator = self.context.streams.generator(f"batches{stream}", self.round, self.id)
        return plan_batches(self.num_samples, self.context.train.batch_size, wanted, generator, repeats)

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
        weight_decay: float | None = None,
        steps: int | None = None,
        repeats: int = 1,
        groups: Mapping[str, ParameterGroup] | None = None,
        keep_optimizer: bool | Collection[str] | None = None,
        each_epoch: Callable[[Tree], Awaitable[None]] | None = None,
        task: Task | None = None,
        stream: str = "",
    ) -> Tree:
        """Local steps of the configured optimizer from ``trainable`` on ``objective``; returns the trained tree.

        Images are augmented as configured, here and nowhere else, with numbers from the stream ``augment``.

        Args:
            trainable: the tree to train, left as it is. A tensor that the objective does not read has a zero
                gradient, so weight decay still moves it (with Adam by the learning rate at each step, however small
                it is): what shall not move belongs into ``frozen``.
            objective: ``(trainable, batch, task, frozen, draw) -> scalar``.
            frozen: tensors the objective reads.
            draw: makes the random numbers of all steps, from the stream ``mix``.
            epochs: default the configured local epochs.
            lr: default the round's learning rate.
            momentum: of SGD; default the configured momentum.
            weight_decay: default the configured weight decay.
            steps: number of mini-batches in place of whole epochs.
            repeats: how many consecutive steps use each mini-batch.
            groups: how what lies under a first key of ``trainable`` is treated, where it differs from the above.
            keep_optimizer: whether the optimizer goes on where the last pass of the same ``stream`` left it (its
                buffers and number of steps then are part of the client's state, ``optimizer``), or the first keys of
                ``trainable`` for which it does; default as configured.
            each_epoch: awaited after every epoch with the tree as trained so far.
            task: what the objective is given; default the client's task.
            stream: suffix of the streams, for a pass other than a round's first (``.1``, ``.finetune``).

        Raises:
            MethodError: when ``momentum``, here or in a group, is given for what is trained by Adam.
        """
        train = self.context.train
        streams, t = self.context.streams, self.round
        plan = self.batches(epochs=epochs, steps=steps, repeats=repeats, stream=stream)
        rule = ParameterGroup(self.lr if lr is None else lr, momentum, weight_decay).applied(train.rule)
        kept = train.persist_optimizer if keep_optimizer is None else keep_optimizer
        draws = None if draw is None else draw(streams.generator(f"mix{stream}", t, self.id), plan.steps)
        variations = None
        if (augmentation := self.context.augmentation) is not None:
            generator = streams.generator(f"augment{stream}", t, self.id)
            variations = Variations.of_steps(augmentation, plan.bounds, repeats, generator)
        request = TrainRequest(
            client=self.id,
            examples=self._examples["train"],
            trainable=trainable,
            frozen=None if frozen is None else map_leaves(self._to_device, frozen),
            objective=objective,
            draws=draws,
            plan=plan,
            rule=rule,
            seed=streams.integer(f"dropout{stream}", t, self.id),
            groups=tuple((groups or {}).items()),
            max_grad_norm=train.max_grad_norm,
            task=task,
            variations=variations,
        )
        memory = self._kept(stream, request.rules) if kept else None
        request = replace(request, kept=memory)
        if each_epoch is None or not plan.steps:
            trained: Tree = await Ask(request)
        else:
            trained = await self._by_epoch(request, repeats, each_epoch)
        if memory is not None and memory.slots and plan.steps:
            stored = memory.stored(None if isinstance(kept, bool) else kept)
            self.state["optimizer"] = {**self.state.get("optimizer", {}), _pass_name(stream): stored}
        return trained

    async def gradient(
        self,
        point: Tree,
        objective: Objective,
        *,
        frozen: Mapping[str, Any] | None = None,
        task: Task | None = None,
    ) -> Tree:
        """The gradient of ``objective`` at ``point`` over all of the client's training samples."""
        batch_size = self.context.train.batch_size or self.num_samples
        request = GradientRequest(
            client=self.id,
            examples=self._examples["train"],
            point=point,
            objective=objective,
            batch_size=max(batch_size, _LARGE_BATCH),
            seed=self.context.streams.integer("dropout.gradient", self.round, self.id),
            frozen=None if frozen is None else map_leaves(self._to_device, frozen),
            task=task,
        )
        result: Tree = await Ask(request)
        return result

    async def outputs(
        self, function: Callable[[Tensor, Task], Tensor], x: Tensor | None = None, *, task: Task | None = None
    ) -> Tensor:
        """The rows ``function(x, task)`` for many samples in large batches, without gradients; shape (n, ...).

        Args:
            function: runs networks with ``training=False``.
            x: the samples, on the device; default the client's training samples.
            task: what the function is given; default the client's task.
        """
        x = self._examples["train"].x if x is None else x
        rows: Tensor = await Ask(OutputRequest(self.id, x, function, _LARGE_BATCH, task))
        return rows

    async def score(self, predictor: Predictor, split: str = "train") -> Statistics:
        """The task's metrics of a predictor on one of the client's splits, in evaluation mode."""
        examples, models = self._examples[split], predictor.built()
        task = predictor.task or self.task
        if not len(examples):
            return Statistics.empty(task.measures)
        rows = await self.outputs(lambda x, task: predictor.predictions(models, x, task), examples.x, task=task)
        return Statistics.from_vector(task.measures.statistics(rows, examples.y), task.measures)

    def publish(self, **predictors: Predictor) -> None:
        """Offers models right after local training as rows (phase ``trained``) of the cohort's results."""
        self.published.update(predictors)

    async def _by_epoch(
        self, request: TrainRequest, repeats: int, each_epoch: Callable[[Tree], Awaitable[None]]
    ) -> Tree:
        """A training pass in pieces of an epoch; without dropout the same as in one piece."""
        epoch = num_steps(self.num_samples, self.context.train.batch_size, 1) * repeats
        tree, kept = request.trainable, Kept() if request.kept is None else request.kept
        for number, piece in enumerate(request.pieces(epoch)):
            # each piece seeds dropout anew
            tree = await Ask(replace(piece, trainable=tree, kept=kept, seed=request.seed ^ number))
            await each_epoch(tree)
        return tree

    def _initialized(self, stream: str, client: int, task: Task | None = None) -> Tree:
        seed = self.context.streams.integer(stream, client=client)
        return map_leaves(self._to_device, (task or self.task).network.initialize(seed))

    def _kept(self, stream: str, rules: Sequence[Rule]) -> Kept:
        """What the optimizer of the last pass of a stream has left; nothing before the first."""
        stored = self.state.get("optimizer", {}).get(_pass_name(stream), {})
        return Kept.of(stored, {name for rule in rules for name in rule.slots})

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf


def _pass_name(stream: str) -> str:
    """Where the state keeps what the optimizer of a pass has left."""
    return stream.removeprefix(".") or "main"
