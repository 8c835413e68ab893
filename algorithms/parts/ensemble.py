"""Distillation on the server: the mean of clients' models learns on public samples what all of them say there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.architectures import task_of
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.optimization.optimizers import OptimizerName
from rayfl.optimization.schedules import Cosine
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task, Trait


class EnsembleDistillation(Averaging):
    """A method whose server averages the models x_k of the cohort S into w, and then goes N steps down

        mean over a mini-batch of U of KL(softmax(T / tau) || softmax(f(w) / tau)),    T = 1/|S| sum_k f(x_k)

    where U are public samples without labels and T the mean logits of the clients' models on them, in evaluation mode.
    A client that is to teach leaves its trained model as ``teacher`` in its state.

    References:
        Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
        Algorithm 1, eq. 1.
    """

    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "the server distills probabilities of classes"}
    no_privacy: ClassVar[str] = "its server has clients teach it what their models say, beside the mean of the models"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server runs the model on public samples, and needs all of its layers for that"
    )

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    distill_steps: int = setting(10_000, "N", "steps of the server in a round; 0: federated averaging", ge=0)
    distill_target: Literal["avg_logits", "avg_probs", "avg_losses"] = setting(
        "avg_logits",
        "",
        "what the student learns: the softmax of the mean logits, the mean of the probabilities, or by the mean of the "
        "divergences from each teacher",
        unless={"distill_steps": (0,)},
    )
    temperature: float = setting(
        1.0, "tau", "divides the logits of teachers and student", gt=0, unless={"distill_steps": (0,)}
    )
    server_optimizer: OptimizerName = setting(
        "adam",
        "",
        "optimizer of the server; without weight decay, so that adamw is adam",
        unless={"distill_steps": (0,)},
    )
    server_lr: float = setting(
        1e-3, "eta_s", "learning rate of the server's first step", ge=0, unless={"distill_steps": (0,)}
    )
    server_schedule: Literal["cosine", "constant"] = setting(
        "cosine",
        "",
        "course of the server's learning rate over the steps of a round: down to 0, or constant",
        unless={"distill_steps": (0,)},
    )
    server_batch_size: int = setting(
        128, "", "public samples in a mini-batch of the server", ge=1, unless={"distill_steps": (0,)}
    )
    server_max_grad_norm: float | None = setting(
        5.0, "", "largest norm of a gradient of the server; null: no limit", gt=0, unless={"distill_steps": (0,)}
    )

    def check_data(self, task: Task, sizes: Any, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.distill_steps and not public:
            raise ConfigError(
                f"holdout.public is 0, but in {self.name} the server learns from public samples: set "
                "holdout.public=1000, or algorithm.distill_steps=0"
            )

    def taught(self, models: Mapping[str, Tree], cohort: Sequence[int], clients: Clients) -> dict[str, Tree]:
        """Returns models after the server's steps; they learn what the cohort's teachers say.

        Args:
            models: w, by the number of its architecture.
            cohort: clients whose state has a ``teacher``, which they drop.
            clients: all clients.
        """
        # A deployment's server has the models: that their outputs come from the actors is no communication.
        said = clients.mean(self.teach, cohort, {}, counted=False)
        given = {number: {"model": model, "number": int(number), **said} for number, model in models.items()}
        return {number: clients.on_server(self.distil, one)["model"] for number, one in given.items()}

    async def teach(self, client: Client) -> Weighted:
        """Returns what the trained model says of the public samples, of shape (|U|, ...); drops the model."""
        model = client.state.pop("teacher")

        def outputs(x: Tensor, task: Any) -> Tensor:
            return self.lesson(task.network.logits(model, x, training=False))

        return Weighted({"targets": await client.outputs(outputs, client.public(), task=task_of(client))})

    async def distil(self, server: Server, model: Tree, number: int, targets: Tensor) -> Tree:
        """The server's steps on the public samples."""
        trained = await server.train(
            model,
            self.ensemble_loss,
            examples=Examples(server.public(), targets),
            steps=self.distill_steps,
            settings=TrainConfig(
                optimizer=self.server_optimizer,
                lr=self.server_lr,
                batch_size=self.server_batch_size,
                max_grad_norm=self.server_max_grad_norm,
            ),
            schedule=Cosine() if self.server_schedule == "cosine" else None,
            task=server.task.candidates[number],
            stream=".distill",
        )
        return {"model": trained}

    def lesson(self, logits: Tensor) -> Tensor:
        """Returns what of a teacher's logits (b, C) is averaged over teachers.

        Returns:
            The logits; or the probabilities; or, with ``avg_losses``, the probabilities and in one more column the sum
            of p log p.
        """
        if self.distill_target == "avg_logits":
            return logits
        logs = (logits / self.temperature).log_softmax(-1)
        if self.distill_target == "avg_probs":
            return logs.exp()
        return torch.cat([logs.exp(), (logs.exp() * logs).sum(-1, keepdim=True)], -1)

    def ensemble_loss(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The student's mean divergence from its teachers."""
        return self.divergence(task.logits(model, batch), batch)

    def divergence(self, student: Tensor, batch: Batch) -> Tensor:
        """The mean over a mini-batch of KL(teachers || student); a scalar.

        Args:
            student: logits (b, C).
            batch: its ``y`` are means of :meth:`lesson` over the teachers.
        """
        if self.distill_target == "avg_logits":
            return distillation(student, batch.y, batch, self.temperature) / self.temperature**2
        logs, classes = (student / self.temperature).log_softmax(-1), student.shape[-1]
        probabilities = batch.y[:, :classes]
        if self.distill_target == "avg_probs":
            known = torch.special.xlogy(probabilities, probabilities).sum(-1)
        else:
            known = batch.y[:, classes]
        return batch.mean(known - (probabilities * logs).sum(-1))
