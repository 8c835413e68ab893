"""FedCross: several models go round the clients, and each takes a little of another one after every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.kept_models import largest_model
from algorithms.parts.means import mean_of
from algorithms.parts.partial import part
from algorithms.parts.split_clusters import cosines, gram
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Predictor, Task

Choice = Literal["in_order", "highest", "lowest"]
"""Which models are partners of a model."""


def partners_of(place: int, similarities: Tensor, choice: Choice, count: int, round: int) -> list[int]:
    """Returns the places of the models that a model is mixed with, the first of equal ones first; never its own.

    Args:
        place: of the model.
        similarities: of all models, symmetric, shape (m, m), m >= 2.
        choice: the most or the least similar, or those that follow at a distance that grows with the rounds.
        count: how many, at most m - 1.
        round: t, 0-indexed.
    """
    m = len(similarities)
    if choice == "in_order":
        return [(place + (round + step) % (m - 1) + 1) % m for step in range(count)]
    order = torch.argsort(similarities[place], descending=choice == "highest", stable=True).tolist()
    return [other for other in order if other != place][:count]


class FedCross(FineTuning):
    """FedCross (multi-model cross-aggregation): K models, each trained by another client in every round, and mixed.

    The server has as many middleware models w^1..w^K as clients take part in a round. It draws at random which client
    of the cohort gets which model, and the client trains w^i to v^i, as in federated averaging. Then

        w^i <- alpha v^i + (1 - alpha) v^co(i),    w = 1/K sum_i w^i

    where v^co(i) is the collaborative model of v^i: the one with the least cosine of the angle to it (``lowest``), the
    largest (``highest``), or of m trained models the one that follows at distance 1 + t mod (m - 1) in round t
    (``in_order``). With several partners (propeller models) v^co(i) is their mean. In the first ``warmup_rounds``
    rounds all trained models become their mean. Cosines are over all parameters; buffers (running statistics) are mixed
    as well. A model that no client of a smaller cohort got stays, and is nobody's partner.

    Server: w^1..w^K, at first all w_0, and w. Client: nothing. Down: one w^i. Up: v^i. Evaluated: w (``global``); with
    ``finetune_epochs`` also w after fine-tuning (``finetuned``).

    With a cohort of always K clients, all other models as partners, and alpha = 1/K it is federated averaging with
    uniform weights. With ``in_order`` a mixing leaves the mean of the models as it is.

    References:
        Hu, Zhou, Yue, Ling, Huang, Li, Liu, Lian, Chen: FedCross: Towards Accurate Federated Learning via Multi-Model
        Cross-Aggregation, ICDE 2024, Algorithm 1.
    """

    name: Literal["fedcross"] = "fedcross"
    no_privacy: ClassVar[str] = "the server mixes the models of single clients"
    citation: ClassVar[str] = "Hu et al., ICDE 2024"
    server_keeps: ClassVar[str] = "w^1..w^K, w"
    kept_on_server: ClassVar[str] = "as many models as clients take part in a round"

    alpha: float = setting(
        0.99, "alpha", "share that a trained model keeps of itself; 1: models are never mixed", ge=0, le=1
    )
    choice: Choice = setting(
        "lowest",
        "",
        "which model is a model's partner: the least or the most similar one, or one after the other",
        unless={"alpha": (1,), "partners": (None,)},
    )
    partners: int | None = setting(
        1, "", "models that a model is mixed with, of equal weights; null: all others", ge=1, unless={"alpha": (1,)}
    )
    warmup_rounds: int = setting(0, "", "first rounds after which all models become their mean", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        train = context.train
        if train.sampling == "poisson" and context.smallest_cohort < context.num_clients:
            raise ConfigError(
                "fedcross has as many models as clients in a round, and train.sampling=poisson draws cohorts of any "
                "size: set train.sampling=fixed"
            )

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        return context.cohort_size * largest_model(task)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"model": model, "models": {str(i): model for i in range(context.cohort_size)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, models = clients.context, server["models"]
        drawn = context.streams.generator("dispatch", context.round).permutation(len(models))[: len(cohort)].tolist()
        given = dict(zip(cohort, map(str, drawn), strict=True))
        payloads = {client: {"model": models[number]} for client, number in given.items()}
        replies = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        trained = {given[client]: reply for client, reply in replies.items()}
        # in the order of their numbers, not of the clients
        trained = {number: trained[number] for number in models if number in trained}
        names = clients.task.network.parameter_names
        models = {**models, **dict(zip(trained, self.mixed(list(trained.values()), names, context.round), strict=True))}
        return {"model": mean_of(map(Weighted, models.values())), "models": models}

    def mixed(self, trained: Sequence[Tree], names: Sequence[str], round: int) -> list[Tree]:
        """Returns what becomes of the trained models.

        Args:
            trained: v^i.
            names: of the parameters, whose cosines count.
            round: t, 0-indexed.
        """
        if len(trained) < 2:
            return list(trained)
        if round < self.warmup_rounds:
            return [mean_of(map(Weighted, trained))] * len(trained)
        count = min(self.partners or len(trained), len(trained) - 1)
        similarities = cosines(gram([part(model, names) for model in trained]))
        found = []
        for place, own in enumerate(trained):
            others = partners_of(place, similarities, self.choice, count, round)
            found.append(interpolate(own, mean_of(Weighted(trained[other]) for other in others), 1 - self.alpha))
        return found

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}  # any other model is as long

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return trained

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
