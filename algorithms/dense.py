"""DENSE: one round, after which the server makes samples on which the clients' models teach one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.architecture_models import ArchitectureModels
from algorithms.parts.architectures import architecture, task_of
from algorithms.parts.input_bounds import bounds_of
from algorithms.parts.inversion import Inversion, Lessons, MakesInputs
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait


class DENSE(MakesInputs, ArchitectureModels):
    """DENSE (data-free one-shot federated learning): the server makes samples, on which the clients' models teach w.

    Clients train the received model until they are done (``train.local_epochs``), and send it, once. The server has no
    samples. R times it draws a generator G, noise z and labels y, B of each, and goes down, with Adam over z and the
    parameters of G,

        a CE(T(G(z)), y) + b BN(G(z)) - c mean omega KL(T(G(z)) || w(G(z))),    T(x) = sum_k q_k w_k(x)

    BN is how far means and variances of what batch normalizations read are from their running ones, the mean over the
    models w_k. omega is 1 where T and w choose different classes, else 0: samples lie where w has yet to learn. After
    each draw w learns tau^2 KL(softmax(T / tau) || softmax(w / tau)) on all samples that there are.

    That is a run of one round. In further rounds clients train the w of the round before, and all else is repeated.
    Clients may have different architectures (``model.candidates``), each a draw of the client's own: the server then
    has one w for each, which all learn, and omega and KL are of the first.

    Server: w, for each architecture. Client: nothing. Down: w. Up: w_k, and the least and the largest value of its
    inputs, by channel. Evaluated: w (``global``), that of the client's architecture; fine-tuned with
    ``finetune_epochs``.

    References:
        Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022 (arXiv
        2112.12371); formulas of the authors' code.
    """

    name: Literal["dense"] = "dense"
    citation: ClassVar[str] = "Zhang et al., NeurIPS 2022"
    no_privacy: ClassVar[str] = "its server runs the model of each client, which noise on a sum does not hide"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "it makes samples of classes",
        "distribution": "the server distills probabilities of classes",
    }
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server makes samples for whole models, and needs all of their layers for that"
    )

    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_k", "weights of the clients' logits: uniform 1/|S|, or samples n_k / sum over the cohort"
    )
    draws: int = setting(200, "R", "how often noise is drawn in a round", ge=1)
    made_per_draw: int = setting(256, "B", "samples that are made of a draw", ge=2)
    generator_steps: int = setting(30, "", "steps of G and z for each draw", ge=1)
    generator_lr: float = setting(1e-3, "", "learning rate of G", ge=0)
    noise_lr: float = setting(1e-3, "", "learning rate of z", ge=0)
    noise_dim: int = setting(256, "m", "numbers of noise for a sample", ge=1)
    generator_width: int = setting(64, "f", "maps of G's last layer but one; twice as many before", ge=1)
    label_weight: float = setting(1.0, "a", "weight of the cross-entropy of made samples", ge=0)
    statistics_weight: float = setting(1.0, "b", "weight of BN; without batch normalization it is 0", ge=0)
    boundary_weight: float = setting(1.0, "c", "weight of where w and the clients' models differ", ge=0)
    student_epochs: int = setting(1, "", "passes of w over all samples made so far, after each draw", ge=1)
    student_lr: float = setting(0.005, "", "learning rate of w", ge=0)
    temperature: float = setting(20.0, "tau", "temperature of the distillation", gt=0)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if context.rounds == 1:
            return ()
        return (
            f"dense is made for one round (train.rounds=1), before which clients train for long; with "
            f"train.rounds={context.rounds} all that the server does is repeated in each round",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models, context, count = server["models"], clients.context, len(clients.task.candidates)
        common: Tree = {"model": models["0"]} if count == 1 else {}
        own = {k: {"model": models[str(architecture(k, count, context))]} for k in cohort} if count > 1 else None
        sent = clients.map(self.train_and_send, cohort, common, own)
        low = torch.stack([one["low"] for one in sent.values()]).amin(0)
        sizes = torch.from_numpy(clients.num_samples(list(sent))).to(low)
        weights = torch.ones_like(sizes) if self.aggregation == "uniform" else sizes
        given = {
            "students": models,
            "models": {str(k): one["model"] for k, one in sent.items()},
            "weights": weights / weights.sum(),
            "low": low,
            "high": torch.stack([one["high"] for one in sent.values()]).amax(0),
        }
        return {"models": clients.on_server(self.fused, given)}

    async def train_and_send(self, client: Client, model: Tree) -> Tree:
        """Trains the received model; returns it as ``model``, and the bounds of the client's inputs."""
        task = task_of(client)
        trained = await client.train(model, self.objective, task=task)
        client.publish(local=Predictor.of(trained, task=task))
        low, high = bounds_of(client.examples().x)
        return {"model": trained, "low": low, "high": high}

    async def fused(
        self, server: Server, students: Tree, models: Tree, weights: Tensor, low: Tensor, high: Tensor
    ) -> Tree:
        """What the clients' models have taught on made samples: w by the number of its architecture.

        Args:
            server: the server.
            students: w of before, by the number of its architecture.
            models: w_k by client.
            weights: q_k, shape (|S|,).
            low: least value of each number of an input.
            high: the largest.
        """
        drawn = server.context.streams.generator("synthesis", server.round, server.id)
        candidates = server.task.candidates
        numbers = {name: architecture(int(name), len(candidates), server.context) for name in models}
        inversion, classes = self._inversion(numbers), list(range(server.task.network.head_shape[0]))
        lessons = Lessons(self.student_lr, self.made_per_draw, self.temperature)

        def said(x: Tensor, task: Any) -> Tensor:
            return inversion.mean_logits(models, weights, x, task)

        made: Tree = {}
        for number in range(self.draws):
            student = students["0"] if self.boundary_weight else {}
            judges = {"models": models, "weights": weights, "student": student, "low": low, "high": high}
            _, x = await inversion.made(server, inversion.network(low, drawn), judges, classes, drawn, number)
            new = {"x": x, "logits": await server.outputs(said, x)}
            made = {name: torch.cat([made[name], leaf]) for name, leaf in new.items()} if made else new
            students = {
                key: await lessons.learned(
                    server, student, made, number, task=candidates[int(key)], epochs=self.student_epochs
                )
                for key, student in students.items()
            }
        return students

    def _inversion(self, architectures: Mapping[str, int]) -> Inversion:
        return Inversion(
            size=self.made_per_draw,
            steps=self.generator_steps,
            generator_lr=self.generator_lr,
            noise_lr=self.noise_lr,
            noise_dim=self.noise_dim,
            width=self.generator_width,
            label_weight=self.label_weight,
            statistics_weight=self.statistics_weight,
            boundary_weight=self.boundary_weight,
            agreeing=False,
            architectures=architectures,
        )

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)
