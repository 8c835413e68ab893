"""Samples that a server makes for models which have learned from others, and a student that learns on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm
from algorithms.parts.synthesis import boundary_divergence, draw_generator, generated, statistics_apart
from algorithms.parts.transfer import distillation
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Task


class MakesInputs(Algorithm):
    """A method whose server makes inputs, which are arrays of numbers between bounds."""

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        kind = getattr(getattr(task, "spec", None), "kind", "image")
        if kind != "image":
            what = {"tokens": "rows of tokens", "graph": "graphs"}[kind]
            raise ConfigError(
                f"algorithm: {self.name} cannot learn task={task.name} from {what}: a generator makes arrays of "
                f"numbers between bounds. Choose another method, such as {self.instead}"
            )

    @property
    def instead(self) -> str:
        """Methods that take any inputs."""
        return "fedavg"


@dataclass(frozen=True)
class Inversion:
    """How a generator G learns to make samples of given classes for an ensemble T of models, and for a student s:

    a CE(T(G(z)), y) + b BN(G(z)) - c mean omega KL(T(G(z)) || s(G(z))), where T are mean logits, and BN is the mean of
    the models' :func:`statistics_apart`.

    Attributes:
        size: B, samples of a draw of noise.
        steps: of Adam for a draw, over the parameters of G and z.
        generator_lr: learning rate of G.
        noise_lr: learning rate of z.
        noise_dim: numbers of noise for a sample.
        width: of G, see :func:`draw_generator`.
        label_weight: a.
        statistics_weight: b.
        boundary_weight: c.
        agreeing: whether omega is 1 where T and s choose the same class, and 0 elsewhere; or the other way round.
        architectures: numbers of the models' architectures, where these are several.
    """

    size: int
    steps: int
    generator_lr: float
    noise_lr: float
    noise_dim: int
    width: int
    label_weight: float
    statistics_weight: float
    boundary_weight: float
    agreeing: bool
    architectures: Mapping[str, int] = field(default_factory=dict)

    def network(self, low: Tensor, drawn: np.random.Generator) -> Tree:
        """G as it begins, for inputs of the shape of ``low``."""
        return draw_generator(low.shape, self.noise_dim, self.width, low, drawn)

    async def made(
        self,
        server: Server,
        network: Tree,
        judges: Tree,
        classes: Sequence[int],
        drawn: np.random.Generator,
        number: int,
    ) -> tuple[Tree, Tensor]:
        """G after a draw of noise, and the samples that it then makes, of shape (B, ...).

        Args:
            server: whose device and streams.
            network: G.
            judges: ``models`` by any names, ``weights`` in their mean (m,), ``student``, of the first architecture
                (empty: c is 0), and ``low`` and ``high``, the least and the largest value of each number of an input.
            classes: of which labels are drawn.
            drawn: where noise and labels come from.
            number: of the draw, which names its stream.
        """
        low, high = judges["low"], judges["high"]
        noise = torch.from_numpy(drawn.standard_normal((self.size, self.noise_dim))).to(low)
        labels = torch.from_numpy(drawn.choice(classes, self.size)).to(low.device)
        trained = await server.train(
            {"generator": network, "noise": noise},
            self.value,
            frozen={**judges, "labels": labels},
            steps=self.steps,
            settings=TrainConfig(optimizer="adam", lr=self.generator_lr, betas=(0.5, 0.999)),
            groups={"noise": ParameterGroup(lr=self.noise_lr)},
            stream=f".generator.{number}",
        )
        return trained["generator"], generated(trained["generator"], trained["noise"], low, high).detach()

    def value(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """What G and z go down: a pure function for ``server.train``; the mini-batch is empty."""
        x = generated(trained["generator"], trained["noise"], frozen["low"], frozen["high"])
        models, weights = frozen["models"], frozen["weights"]
        teacher = self.mean_logits(models, weights, x, task)
        value = self.label_weight * F.cross_entropy(teacher, frozen["labels"])
        if self.statistics_weight:
            apart = [statistics_apart(model, x, self._task_of(name, task)) for name, model in models.items()]
            value = value + self.statistics_weight * (weights * torch.stack(apart)).sum()
        if frozen["student"]:
            student = task.network.logits(frozen["student"], x, training=False)
            value = value - self.boundary_weight * boundary_divergence(teacher, student, self.agreeing)
        return value

    def mean_logits(self, models: Mapping[str, Model], weights: Tensor, x: Tensor, task: Task) -> Tensor:
        """T(x) = sum_k q_k z_k(x), of shape (b, C), in evaluation mode.

        Args:
            models: by their names.
            weights: q_k, shape (m,).
            x: inputs.
            task: has the architectures.
        """
        said = [self._task_of(name, task).network.logits(model, x, training=False) for name, model in models.items()]
        return (weights.view(-1, 1, 1) * torch.stack(said)).sum(0)

    def _task_of(self, name: str, task: Task) -> Task:
        return task.candidates[self.architectures.get(name, 0)]


@dataclass(frozen=True)
class Lessons:
    """How a student learns T^2 KL(softmax(t / T) || softmax(s / T)) on samples of which teachers said t, by SGD.

    Attributes:
        lr: learning rate.
        batch_size: samples in a mini-batch.
        temperature: T.
        weight_decay: of all parameters.
        momentum: which begins empty in each pass.
    """

    lr: float
    batch_size: int
    temperature: float
    weight_decay: float = 0.0
    momentum: float = 0.9

    async def learned(
        self, server: Server, student: Tree, made: Tree, number: int, task: Task | None = None, **length: Any
    ) -> Tree:
        """The student after a pass.

        Args:
            server: whose device and streams.
            student: s.
            made: ``x`` and ``logits``, t.
            number: of the pass, which names its stream.
            task: with the student's architecture; None: the only one.
            length: ``steps`` or ``epochs``.
        """
        return await server.train(
            student,
            self._value,
            examples=Examples(made["x"], made["logits"]),
            settings=TrainConfig(
                lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, batch_size=self.batch_size
            ),
            task=task,
            stream=f".student.{number}",
            **length,
        )

    def _value(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return distillation(task.logits(model, batch), batch.y, batch, self.temperature)
