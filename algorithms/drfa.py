"""DRFA: federated averaging for the worst mixture of the clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.simplex import project_onto_simplex
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class DRFA(FineTuning):
    """DRFA (distributionally robust federated averaging): one model for the worst mixture of the clients.

    The problem is that of agnostic federated learning, min over w, max over lambda, of

        sum_i lambda_i F_i(w),    lambda_i >= 0,    sum_i lambda_i = 1

    The server keeps lambda, at first 1/K for each of the K clients. In a round whose cohort U of m clients is drawn
    with equal probabilities it draws a second one, S, of m clients with the probabilities lambda, with replacement. The
    clients of S train w, and their mean, in which one that is drawn twice counts twice, is the next w. Their mean after
    the same random share of everyone's local steps, w', is a sample of the models on the way. The clients of U send the
    loss F_i(w') over all their training samples, and

        lambda <- projection of lambda + tau gamma (K / m) F(w') onto the simplex,    F_i = 0 for i not in U

    ``trained=cohort`` trains U itself in place of S, and weighs its models by lambda_i.

    Server: model w and lambda. Client: nothing. Down: to S w, the share of the steps and the client's weight; to U w'.
    Up: from S w_i and w'_i, from U F_i(w'). Evaluated: w. With ``finetune_epochs`` each client fine-tunes the final
    model.

    References:
        Deng, Kamani, Mahdavi: Distributionally Robust Federated Averaging, NeurIPS 2020, Algorithm 1; Mohri, Sivek,
        Suresh: Agnostic Federated Learning, ICML 2019 (the problem, without local steps).
    """

    name: Literal["drfa"] = "drfa"
    citation: ClassVar[str] = "Deng et al., NeurIPS 2020"
    no_privacy: ClassVar[str] = "its clients say how large their losses are, by which others are drawn or weighed"
    server_keeps: ClassVar[str] = "w, lambda"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "a client sends two models, the last and one on the way"
    )

    weight_lr: float = setting(
        0.01, "tau gamma", "step of lambda in a round, along the losses; 0: lambda stays at 1/K", ge=0
    )
    weight_lr_decay: float = setting(
        1.0, "", "factor on that step per round (authors' code: 0.9)", gt=0, le=1, unless={"weight_lr": (0,)}
    )
    trained: Literal["drawn", "cohort"] = setting(
        "drawn",
        "S",
        "who trains: as many clients as the round's cohort has, drawn by lambda (paper); or that cohort, weighted by "
        "lambda",
    )

    def everyone_needed(self) -> str:
        if self.trained == "cohort":
            return ""
        return "it draws the clients that train by their weights, whether their devices are there or not"

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        train = context.train
        if train.persist_optimizer and (train.optimizer != "sgd" or train.momentum):
            raise ConfigError(
                "DRFA's clients take their first local steps twice, once to stop on the way, and both times the "
                "optimizer begins afresh: set train.persist_optimizer=false"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        count = context.num_clients
        return {**super().init(task, context), "weights": torch.full((count,), 1 / count, dtype=torch.float64)}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, dict[int, Tree]]:
        return {"model": server["model"]}, {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, weights = server["model"], server["weights"].numpy()
        generator = clients.context.streams.generator("mixture", clients.context.round)
        share = 1 - generator.random()  # never 0: every client takes a step before it stops
        counts = self.counts(weights, cohort, generator)
        mean: Tree = {"model": model, "passed": model}  # if nobody of the cohort has a weight
        if counts:
            payloads = {client: {"weight": weight} for client, weight in counts.items()}
            # one that is drawn is drawn whether it can take part or not
            required = True if self.trained == "drawn" else None
            broadcast = {"model": model, "share": share}
            mean = clients.mean(self.local_steps, list(counts), broadcast, payloads, required=required)
        found = clients.map(self.loss_of, cohort, broadcast={"model": mean["passed"]})
        losses = np.zeros(len(weights))
        losses[list(cohort)] = [found[client]["loss"] for client in cohort]
        step = self.weight_lr * self.weight_lr_decay**clients.context.round * len(weights) / len(cohort)
        moved = project_onto_simplex((weights + step * losses)[None], 1.0)[0]
        return {"model": mean["model"], "weights": torch.from_numpy(moved)}

    def counts(self, weights: np.ndarray, cohort: Sequence[int], generator: np.random.Generator) -> dict[int, float]:
        """Returns who trains in a round, ascending, with their weights in the mean; all are positive.

        Args:
            weights: lambda, shape (K,).
            cohort: the round's cohort.
            generator: draws clients, as many as the cohort has.
        """
        if self.trained == "cohort":
            largest = max(weights[client] for client in cohort)
            return {client: float(weights[client] / largest) for client in sorted(cohort) if weights[client] > 0}
        drawn = generator.choice(len(weights), size=len(cohort), p=weights / weights.sum())
        found, times = np.unique(drawn, return_counts=True)
        return {int(client): float(count) for client, count in zip(found, times, strict=True)}

    async def local_steps(self, client: Client, model: Tree, share: float, weight: float) -> Weighted:
        """Trains the received model; returns it with the model after a share of the steps.

        Args:
            client: who trains.
            model: w.
            share: of the local steps after which the model is kept, above 0, at most 1.
            weight: of the client in the mean.
        """
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        steps, passed = client.num_steps(), trained
        if (reached := math.ceil(share * steps)) < steps:
            # the same mini-batches once more: training cannot be stopped on the way
            passed = await client.train(model, self.objective, steps=reached)
        return Weighted({"model": trained, "passed": passed}, weight)

    async def loss_of(self, client: Client, model: Tree) -> Tree:
        """Returns F_i of a model."""
        return {"loss": (await client.score(Predictor.of(model))).loss}
