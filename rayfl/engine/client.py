"""A client as its method sees it: data, state, random streams, and the engine behind ``await``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from fractions import Fraction
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.views import Changes
from rayfl.engine.client_samples import ClientSamples
from rayfl.engine.client_streams import ClientStreams
from rayfl.engine.round_context import RoundContext
from rayfl.engine.scoring.evaluation import samples_at_a_time
from rayfl.engine.scoring.own_score import own_score
from rayfl.engine.steps.optimizer_state import save_optimizer, with_optimizer
from rayfl.engine.updates.batches import BatchPlan, num_steps
from rayfl.engine.updates.local_settings import LocalOptions, LocalSettings
from rayfl.engine.updates.pieces import in_pieces
from rayfl.engine.updates.requests import GradientRequest, Objective, OutputRequest, TrainRequest, arrays_of, on_device
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.stragglers import WHOLE, steps_within
from rayfl.engine.updates.trampoline import Ask
from rayfl.errors import MethodError
from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.optimization.schedules import Schedule
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Predictor, Task

Draw = Callable[[np.random.Generator, int], Tree]
"""``draw(generator, steps)``: a tree of arrays with one entry a step along dimension 0."""

_LARGE_BATCH = 256


class Client(ClientSamples):
    """One client during one procedure.

    Attributes:
        id: the client's number, 0..K-1.
        context: round, rounds, training section, streams.
        state: a tree that persists from round to round. Assign new values; never change a tensor in place.
            Changes are kept only if the procedure returns.
        task: what is learned.
        published: predictors made public by :meth:`publish`.
        work: the share of its epochs' steps that it takes; less than 1 for a straggler in training.
        noised: of each pass with ``privacy.example_clip_norm``: the steps on a mini-batch, and the mini-batches.
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
        work: Fraction = WHOLE,
    ) -> None:
        super().__init__(examples, public)
        self.id = id
        self.state = state
        self.task = task
        self.context = context
        self.work = work
        self.published: dict[str, Predictor] = {}
        self.noised: list[tuple[int, int]] = []
        self._device = device

    @property
    def round(self) -> int:
        """t, 0-indexed: the round in which the client began, which sets its learning rate and random numbers."""
        return self.context.started.get(self.id, self.context.round)

    @property
    def staleness(self) -> int:
        """s, how many steps the server has taken since the client began; 0 in synchronous rounds."""
        return self.context.staleness(self.id)

    @property
    def lr(self) -> float:
        """eta_t, the learning rate of the round in which the client began."""
        return self.context.train.lr_in(self.round)

    def num_steps(self, epochs: int | None = None, samples: int | None = None) -> int:
        """Local SGD steps of some epochs; a straggler's are fewer.

        Args:
            epochs: default the configured local epochs.
            samples: number of training samples; default the client's own.
        """
        steps = self.context.train.steps_of(self.num_samples if samples is None else samples, epochs)
        return steps_within(steps, self.work)

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
        """Returns the mini-batches that :meth:`train` uses when given the same arguments.

        A method passes values held per sample to the objective through ``draw``, in the order of these batches.
        """
        asked = LocalOptions(epochs=epochs, steps=steps, repeats=repeats, stream=stream)
        train, samples = self.context.train, self.num_samples
        return self._streams.plan(LocalSettings.of(train, self.round, samples, work=self.work, **asked), train, samples)

    def paired_batches(
        self, first: int, second: int, ratio: int = 1, *, epochs: int | None = None, stream: str = ""
    ) -> BatchPlan:
        """Returns mini-batches of two kinds of samples together, for ``plan`` of :meth:`train`.

        A mini-batch has B samples of the first kind, and then ``ratio`` times as many of the second, whose numbers
        follow those of the first. Steps are those of the configured epochs over the second kind.

        Args:
            first: how many samples of the first kind there are.
            second: how many of the second.
            ratio: how many of the second kind a mini-batch has for each of the first.
            epochs: over the second kind; default the configured local epochs.
            stream: suffix of the streams, as that of the pass.
        """
        return self._streams.paired(first, second, ratio, epochs, self.work, stream)

    async def train(
        self,
        trainable: Tree,
        objective: Objective,
        *,
        frozen: Mapping[str, Any] | None = None,
        draw: Draw | None = None,
        each_epoch: Callable[[Tree], Awaitable[bool | None]] | None = None,
        task: Task | None = None,
        examples: Examples | None = None,
        settings: TrainConfig | None = None,
        schedule: Schedule | None = None,
        plan: BatchPlan | None = None,
        views: Changes | None = None,
        **options: Unpack[LocalOptions],
    ) -> Tree:
        """Minimizes ``objective`` by local steps of the optimizer, from ``trainable``; returns the trained tree.

        The client's own images are augmented as configured, here and nowhere else, with numbers from the stream
        ``augment``. A task that compares two views of each image has them of all images.

        Args:
            trainable: the tree to train, left as it is. A tensor that the objective does not read has a zero
                gradient, so weight decay still moves it (with Adam by the learning rate at each step, however small
                it is): what shall not move belongs into ``frozen``.
            objective: ``(trainable, batch, task, frozen, draw) -> scalar``.
            frozen: tensors and numbers the objective reads; NumPy's become PyTorch's and Python's.
            draw: makes the random numbers of all steps, from the stream ``mix``: one entry a step.
            each_epoch: awaited after every epoch (without samples: the last step) with the tree; true ends the pass.
            task: what the objective is given; default the client's task.
            examples: what to train on in place of the client's training samples, on the device. Their ``y`` may be any
                targets, one a row, which the objective reads as ``batch.y``.
            settings: what to train with in place of the section ``train``: optimizer, rate, batch size, clipping.
            schedule: learning rate over the steps of this pass; groups with a rate of their own keep it.
            plan: the mini-batches, in place of drawn ones; then the steps are its own.
            views: how the images of ``examples`` are changed at random; the results are ``batch.x``.
            **options: any of

                * ``epochs``: default the configured local epochs.
                * ``lr``: default the round's learning rate.
                * ``momentum``: of SGD; default the configured momentum.
                * ``weight_decay``: default the configured weight decay.
                * ``steps``: number of mini-batches in place of whole epochs.
                * ``repeats``: how many consecutive steps use each mini-batch.
                * ``groups``: how what lies under a first key (or path) of ``trainable`` is treated, where it differs
                  from the above; the longest path counts.
                * ``keep_optimizer``: whether the optimizer goes on where the last pass of the same ``stream`` left it
                  (its buffers and number of steps then are part of the client's state, ``optimizer``), or the first
                  keys of ``trainable`` for which it does; default as configured.
                * ``stream``: suffix of the streams, for a pass other than a round's first (``.1``, ``.finetune``).

        Raises:
            MethodError: when ``momentum``, here or in a group, is given for what is trained by Adam, or ``groups`` or
                ``keep_optimizer`` names what ``trainable`` does not have, or ``draw`` returns too few or many entries,
                or the optimizer is kept where the stream's last pass has trained other tensors (see ``stream``).
        """
        train = self.context.train if settings is None else settings
        samples = self._training(examples)
        local = LocalSettings.of(train, self.round, len(samples), work=self.work, **options)
        local.check(trainable)
        streams, usual = self._streams, examples is None and settings is None
        given, plan = plan is not None, streams.plan(local, train, len(samples)) if plan is None else plan
        varied = examples is None or views is not None or streams.viewed(samples)
        request = TrainRequest(
            client=self.id,
            examples=samples,
            trainable=trainable,
            frozen=None if frozen is None else map_leaves(self._to_device, frozen),
            objective=objective,
            draws=None if draw is None else arrays_of(draw(streams.generator("mix", local), plan.steps), plan.steps),
            plan=plan,
            rule=local.rule,
            seed=streams.seed("dropout", local),
            groups=local.groups,
            max_grad_norm=train.max_grad_norm,
            task=task,
            variations=streams.variations(local, plan, views) if varied else None,
            private=streams.private(local, plan, len(samples), objective, usual, self.noised),
        )
        if local.keep_optimizer:
            request = with_optimizer(self.state, request, local.stream, task or self.task)
        if not plan.steps or (each_epoch is None and schedule is None):
            trained: Tree = await Ask(request)
        else:
            epoch = 0 if given else num_steps(len(samples), train.batch_size, 1, train.drop_last) * local.repeats
            trained = await in_pieces(request, epoch or plan.steps, each_epoch, schedule)  # no samples: one epoch
        save_optimizer(self.state, request, local)
        return trained

    async def gradient(
        self,
        point: Tree,
        objective: Objective,
        *,
        frozen: Mapping[str, Any] | None = None,
        task: Task | None = None,
        examples: Examples | None = None,
    ) -> Tree:
        """The gradient of ``objective`` at ``point``: the mean over all training samples, or over those given."""
        if self.context.privacy.of_examples:
            raise MethodError(
                "privacy.example_clip_norm: Client.gradient has no noise; epsilon is that of Client.train"
            )
        samples = self._training(examples)
        batch_size = self.context.train.batch_size or len(samples)
        request = GradientRequest(
            client=self.id,
            examples=self._streams.views_of(samples),
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
        count = samples_at_a_time(_LARGE_BATCH, task or self.task)
        rows: Tensor = await Ask(OutputRequest(self.id, x, function, count, task))
        return rows

    async def score(self, predictor: Predictor, split: str = "train") -> Statistics:
        """The task's metrics of a predictor on one of the client's splits, in evaluation mode."""
        examples, training = self._examples[split], self._examples["train"]
        task = predictor.task or self.task
        return await own_score(self.outputs, predictor, examples, training, split == "train", task)

    def publish(self, **predictors: Predictor) -> None:
        """Publishes models to be scored right after local training, as result rows of phase ``trained``."""
        self.published.update(predictors)

    def _training(self, examples: Examples | None) -> Examples:
        """Returns the samples to train on: those given, or the client's own."""
        return self._examples["train"] if examples is None else examples

    @property
    def _streams(self) -> ClientStreams:
        return ClientStreams(self.context, self.round, self.id)

    def _initialized(self, stream: str, client: int, task: Task | None = None) -> Tree:
        seed = self.context.streams.integer(stream, client=client)
        return map_leaves(self._to_device, (task or self.task).network.initialize(seed))

    def _to_device(self, leaf: Any) -> Any:
        return on_device(leaf, self._device)
