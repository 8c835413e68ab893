"""DepthFL: each client trains the first layers of the network, as many as its depth allows, and their classifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.depth_clients import DepthClients
from algorithms.parts.displacements import anchor_of, keep_displacement
from algorithms.parts.exits import Exits, Parts, depth_count, parts_of
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, Sum, function, squared_distance
from rayfl.params import Tree, zeros_like
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class DepthFL(DepthClients):
    """DepthFL: each client trains the first layers of the network, as many as its depth allows, and their classifiers.

    Depth i of D has the first ceil(i S / D) of the network's S stages (a stage is a layer with what follows it up to
    the next one, or a residual block) and i classifiers: one after the stages of each depth up to i. The last of D is
    the network's own. A client of depth l goes down, with the logits z_1, ..., z_l of a mini-batch,

        sum_i CE(z_i) + lambda_t/(l - 1) sum_{i, j != i} T^2 KL(p_j || p_i) + alpha/2 ||theta - (w - d_k)||^2

    in which p_i = softmax(z_i / T), and p_j is a constant: its classifiers teach each other. lambda_t is lambda
    exp(-5 (1 - t/R)^2) until the round R, and lambda from there. The last term is FedDyn's, on the client's part of the
    network, where d_k is the sum of the theta_k - w of its rounds. So is the server's step: of each tensor the mean
    over the clients S_i of the cohort that have it, and then

        d <- d + |S_i|/K (mean - w),    w <- mean + d

    A tensor that nobody in the cohort has stays as it is. With ``alpha=0`` w is the mean: DepthFL with FedAvg.

    Server: model w with its D classifiers, and d. Client: d_k. Down: the client's part of w. Up: this part, trained.
    Evaluated: all of w (``global``) and the client's part of it (``submodel``), which predict by the mean of their
    classifiers' logits; with ``score_classifiers`` each classifier of w alone (``classifier=i``).

    References:
        Kim, Yu, Kim, Moon: DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023.
    """

    name: Literal["depthfl"] = "depthfl"
    citation: ClassVar[str] = "Kim et al., ICLR 2023"
    client_keeps: ClassVar[str] = "d_k"
    server_keeps: ClassVar[str] = "w, d"
    newcomer: ClassVar[str] = "the layers and classifiers of w that its depth allows"

    aggregation: Literal["samples", "uniform"] = setting(
        "uniform", "q_k", "weights of the mean of a tensor, relative to their sum over the clients that have it"
    )
    distillation_weight: float = setting(
        1.0, "lambda", "weight of what classifiers teach each other, once it has grown", ge=0
    )
    temperature: float = setting(
        1.0, "T", "temperature of both distributions", gt=0, unless={"distillation_weight": (0,)}
    )
    ramp_up: int = setting(
        300,
        "R",
        "rounds in which that weight grows from lambda exp(-5); 0: none",
        ge=0,
        unless={"distillation_weight": (0,)},
    )
    alpha: float = setting(0.1, "alpha", "weight of the dynamic regularisation; 0: without it", ge=0)
    score_classifiers: bool = setting(False, "", "whether each classifier of the server's model has a row of results")

    def needed(self) -> Mapping[Trait, str]:
        if self.distillation_weight == 0:
            return {"features": "its classifiers give one output a sample"}
        return {"distribution": "its classifiers teach each other probabilities of classes"}

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.alpha and self.aggregation != "uniform":
            raise ConfigError(
                "algorithm.aggregation=samples goes without dynamic regularisation, whose server counts clients alike: "
                "set algorithm.alpha=0 or algorithm.aggregation=uniform"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        like, generator = next(iter(model.values())), context.streams.generator("init.exits")
        server = {"model": model, "exits": self.exits(task).drawn(like, generator)}
        return (
            {**server, "displacement": zeros_like(_parameters(server, task.network.parameter_names))}
            if self.alpha
            else server
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        before, exits = parts_of(server), self.exits(clients.task)
        depths = {client: self.depth(client, clients.context, exits.count) for client in cohort}
        cuts = {depth: exits.cut(before, depth) for depth in sorted(set(depths.values()))}
        payloads: dict[int, Tree] = {client: {**cuts[depth]} for client, depth in depths.items()}
        means = clients.means(self.local_update, cohort, {}, payloads)
        weights = dict.fromkeys(cuts, 0)
        for client, weight in zip(cohort, self._weights(cohort, clients), strict=True):
            weights[depths[client]] += weight
        found = exits.merged(before, {int(depth): mean for depth, mean in means.items()}, weights)
        if not self.alpha:
            return {**found}
        levels, everyone = exits.levels(before), clients.context.num_clients
        counts = {level: sum(depth >= level for depth in depths.values()) for level in range(1, exits.count + 1)}
        displacement: Tree = {part: dict(tree) for part, tree in server["displacement"].items()}
        for part, tree in displacement.items():
            for name in tree:
                if count := counts[levels[part][name]]:
                    tree[name] = tree[name] + count / everyone * (found[part][name] - before[part][name])
                    found[part][name] = found[part][name] + tree[name]
        return {**found, "displacement": displacement}

    def _weights(self, cohort: Sequence[int], clients: Clients) -> list[int]:
        found: list[int] = [1] * len(cohort) if self.aggregation == "uniform" else clients.num_samples(cohort).tolist()
        return found

    async def local_update(self, client: Client, model: Tree, exits: Tree) -> Weighted:
        """Trains the received layers and classifiers."""
        network = self.exits(client.task)  # found here, once for each process: no network can be made inside a step
        received, known, names = {"model": model, "exits": exits}, dict[str, Any](), client.task.network.parameter_names
        if teaching := self._teaching(client.round):
            known["teaching"] = next(iter({**model, **exits}.values())).new_tensor(teaching)
        if self.alpha:
            known["anchor"] = anchor_of(client, _parameters(received, names))
        trained = await client.train(received, self.objective, frozen=known)
        if self.alpha:
            keep_displacement(client, _parameters(received, names), _parameters(parts_of(trained), names))
        client.publish(local=self._predictor(parts_of(trained), network.count))
        depth = self.depth(client.id, client.context, network.count)
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return Weighted(trained, weight, group=str(depth))

    def _teaching(self, round: int) -> float:
        """lambda_t."""
        phase = 1 - min(round / self.ramp_up, 1.0) if self.ramp_up else 0.0
        return self.distillation_weight * math.exp(-5 * phase**2)

    @property
    def objective(self) -> Sum:
        """The losses of all classifiers, what they teach each other, and the dynamic regularisation."""
        losses = function(self._losses)
        return losses + self.alpha / 2 * squared_distance(TRAINED, "anchor") if self.alpha else losses

    def _losses(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = self.exits(task).logits(parts_of(trained), batch.x, training=True, mask=batch.mask)
        value = torch.stack([task.loss_of(one, batch) for one in logits]).sum()
        if self.distillation_weight == 0 or len(logits) == 1:
            return value
        pairs = [(i, j) for i in range(len(logits)) for j in range(len(logits)) if i != j]
        taught = [distillation(logits[i], logits[j].detach(), batch, self.temperature) for i, j in pairs]
        share: Tensor = frozen["teaching"] / (len(logits) - 1)
        return value + share * torch.stack(taught).sum()

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        parts, count = parts_of(server), depth_count(task, self.classifiers)
        found = {"global": self._predictor(parts, count)}
        if self.score_classifiers:
            found |= {f"classifier={i}": self._predictor(parts, count, only=i) for i in range(1, count + 1)}
        return found

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        exits = self.exits(client.task)
        own = exits.cut(parts_of(server), self.depth(client.id, client.context, exits.count))
        return {
            **self.global_predictors(server, client.task),
            "submodel": self._predictor(own, exits.count),
        }

    def _predictor(self, parts: Parts, count: int, only: int | None = None) -> Predictor:
        """The mean of all classifiers' logits, or those of one of them, from 1."""

        def predictions(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
            model, exits = models
            logits = Exits(task.network, count).logits({"model": model, "exits": exits}, x)
            found: Tensor = task.predicted(torch.stack(logits).mean(0) if only is None else logits[only - 1])
            return found

        return Predictor.of(parts["model"], parts["exits"], combine=predictions)


def _parameters(parts: Mapping[str, Tree], names: Sequence[str]) -> Parts:
    """What is trained of them: without the network's buffers, and without an empty part."""
    found = {**parts, "model": {name: parts["model"][name] for name in names if name in parts["model"]}}
    return {part: found[part] for part in ("model", "exits") if found[part]}
