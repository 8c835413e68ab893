"""ScaleFL: each client trains a part of the network that is cut in depth and in width, with early exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.capacities import drawn, in_turn
from algorithms.parts.exits import Parts, check_depths, classified, depth_count, parts_of
from algorithms.parts.transfer import distillation
from algorithms.parts.wide_exits import WideExits
from algorithms.parts.widths import check_units
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_NO_NORM = "clients of unlike sizes have unlike parts of the normalization layers"


class ScaleFL(Algorithm):
    """ScaleFL: each client trains a part of the network that is cut in depth and in width, with early exits.

    The network has D classifiers, at the depths of DepthFL. A client of level l has the stages and classifiers up to
    the depth d_l, and of the d units of each hidden layer the first ceil(r_l d). In training the outputs of its hidden
    linear layers and convolutions are divided by r_l. With the logits z_1, ..., z_m of its m = d_l classifiers on a
    mini-batch it goes down

        2/(m (m + 1)) (sum_{i < m} i (CE(z_i) + gamma T^2 KL(p_m || p_i)) + m CE(z_m))

    in which p_i = softmax(z_i / T), and the teacher p_m is a constant. gamma is 0 until the share
    ``distillation_start`` of the rounds is over. An element of the server's model becomes the mean over the clients
    S_ij of the cohort that have it,

        w_ij <- sum_k q_k w_k,ij / sum_k q_k,    k in S_ij

    and stays as it is where there are none. One depth is HeteroFL with these widths.

    Server: model w with its D classifiers. Client: nothing. Down: the client's part of w. Up: this part, trained.
    Evaluated: w, by its last classifier (``global``), and the client's part of w, by its deepest (``submodel``), whose
    outputs are divided by r_l as in training; with ``score_classifiers`` each classifier of w (``classifier=i``).

    References:
        Ilhan, Su, Liu: ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients, CVPR 2023.
    """

    name: Literal["scalefl"] = "scalefl"
    citation: ClassVar[str] = "Ilhan et al., CVPR 2023"
    personalized: ClassVar[str] = "submodel"
    newcomer: ClassVar[str] = "the stages, classifiers and units of w that its level allows"
    no_privacy: ClassVar[str] = (
        "its clients send parts of the model, and each number is the mean over those who have it"
    )
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(("statistics", "all"), _NO_NORM)

    classifiers: int | None = setting(
        None, "D", "how many depths there are; null: 4, or as many as the network has stages if these are fewer", ge=1
    )
    widths: tuple[Annotated[float, Field(gt=0, le=1)], ...] = setting(
        (0.7, 0.7, 0.75, 1.0), "r_l", "shares of each hidden layer's units, one for each level", min_length=1
    )
    depths: tuple[Annotated[int, Field(ge=1)], ...] | None = setting(
        None, "d_l", "depths, one for each level; null: ceil(l D / L) of level l of L", min_length=1
    )
    level_choice: Literal["in_turn", "drawn"] = setting(
        "in_turn",
        "",
        "which of the levels a client has: in_turn, client k the one at place k, and again from the first; drawn, one "
        "draw for the run",
    )
    shares: tuple[Annotated[float, Field(ge=0)], ...] | None = setting(
        None,
        "",
        "how likely each of the levels is drawn, of any sum; null: all alike",
        only={"level_choice": ("drawn",)},
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "uniform", "q_k", "weights of the mean of an element, relative to their sum over the clients that have it"
    )
    distillation_weight: float = setting(
        0.05, "gamma", "weight of what the deepest classifier teaches the others", ge=0
    )
    temperature: float = setting(
        3.0, "T", "temperature of both distributions", gt=0, unless={"distillation_weight": (0,)}
    )
    distillation_start: float = setting(
        0.25,
        "",
        "share of the run's rounds after which classifiers are taught",
        ge=0,
        le=1,
        unless={"distillation_weight": (0,)},
    )
    scaler: bool = setting(
        True,
        "",
        "whether outputs of hidden linear layers and convolutions are divided by the width r_l; for networks that "
        "normalize them, as the paper's do",
        unless={"widths": ((1.0,),)},
    )
    score_classifiers: bool = setting(False, "", "whether each classifier of the server's model has a row of results")

    @model_validator(mode="after")
    def _as_many_as_levels(self) -> Self:
        levels = len(self.widths)
        if self.depths is not None and len(self.depths) != levels:
            raise ValueError(f"depths: give one for each of the {levels} levels that widths has")
        if self.shares is not None and (len(self.shares) != levels or not sum(self.shares) > 0):
            raise ValueError(f"shares: give one for each of the {levels} levels, and not all 0")
        return self

    def needed(self) -> Mapping[Trait, str]:
        if self.distillation_weight == 0:
            return {"features": "its classifiers give one output a sample"}
        return {"distribution": "its last classifier teaches the others probabilities of classes"}

    def check(self, task: Task, context: RoundContext) -> None:
        check_depths(self.name, task, self.classifiers, self.depths)
        check_units(self.name, task)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        whole = max(self.widths) == 1
        if self.classifiers is not None:
            whole = (self.classifiers, 1.0) in self.sizes(self.classifiers)
        if whole:
            return super().remarks(context)
        untrained = "no level has all depths and all units (algorithm.depths, algorithm.widths): what none has of the "
        return (*super().remarks(context), f"{untrained}global model stays as it is drawn, and its score has it")

    def course(self, round: int, rounds: int) -> Any:
        """gamma."""
        return self._taught(round, rounds)

    def _taught(self, round: int, rounds: int) -> float:
        return self.distillation_weight if round >= self.distillation_start * rounds else 0.0

    def exits(self, task: Task) -> WideExits:
        """The network with its classifiers."""
        return WideExits(task.network, depth_count(task, self.classifiers))

    def sizes(self, count: int) -> list[tuple[int, float]]:
        """Depth and width of each level; ``count`` is D."""
        levels = len(self.widths)
        depths = self.depths or tuple(-(-number * count // levels) for number in range(1, levels + 1))
        return list(zip(depths, self.widths, strict=True))

    def level(self, client: int, context: RoundContext) -> int:
        """Which level a client has, from 0.

        Args:
            client: k; numbers of newcomers too.
            context: of the run.
        """
        levels = range(len(self.widths))
        if self.level_choice == "in_turn":
            return in_turn(levels, client)
        return drawn(levels, "levels", client, context, self.shares)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        like, generator = next(iter(model.values())), context.streams.generator("init.exits")
        return {"model": model, "exits": self.exits(task).exits.drawn(like, generator)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        before, exits = parts_of(server), self.exits(clients.task)
        sizes = self.sizes(exits.exits.count)
        levels = {client: self.level(client, clients.context) for client in cohort}
        cuts = {level: exits.cut(before, *sizes[level]) for level in sorted(set(levels.values()))}
        payloads: dict[int, Tree] = {client: {**cuts[level]} for client, level in levels.items()}
        means = clients.means(self.local_update, cohort, {}, payloads)
        own = [1] * len(cohort) if self.aggregation == "uniform" else clients.num_samples(cohort).tolist()
        weights = dict.fromkeys(cuts, 0)
        for client, weight in zip(cohort, own, strict=True):
            weights[levels[client]] += weight
        found = {int(level): parts_of(mean) for level, mean in means.items()}
        return {**exits.merged(before, found, weights, sizes)}

    async def local_update(self, client: Client, model: Tree, exits: Tree) -> Weighted:
        """Trains the received layers and classifiers."""
        network = self.exits(client.task)  # found here, once for each process: no network can be made inside a step
        level = self.level(client.id, client.context)
        depth, width = self.sizes(network.exits.count)[level]
        start = network.padded({"model": model, "exits": exits}, width)
        like, known = next(iter(model.values())), dict[str, Any]()
        if self._scales:
            known["factor"] = like.new_tensor(1 / width)
        if taught := self._taught(client.round, client.context.rounds):
            known["taught"] = like.new_tensor(taught)
        trained = parts_of(await client.train(start, self.objective, frozen=known))
        client.publish(local=self._predictor(network, trained, width))
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return Weighted({**network.cut(trained, depth, width)}, weight, group=str(level))

    @property
    def _scales(self) -> bool:
        return self.scaler and set(self.widths) != {1.0}

    @property
    def objective(self) -> Sum:
        """The losses of all classifiers, and what the deepest teaches the others."""
        return function(self._losses)

    def _losses(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        network, parts = self.exits(task), parts_of(trained)
        if self._scales:
            parts = network.scaled(parts, frozen["factor"])
        logits = network.exits.logits(parts, batch.x, training=True, mask=batch.mask)
        losses = [task.loss_of(one, batch) for one in logits]
        if "taught" in frozen:
            teacher = logits[-1].detach()
            for place, one in enumerate(logits[:-1]):
                losses[place] = losses[place] + frozen["taught"] * distillation(one, teacher, batch, self.temperature)
        total = len(losses) * (len(losses) + 1) / 2
        return torch.stack([loss * (number / total) for number, loss in enumerate(losses, 1)]).sum()

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        found, parts = {"global": Predictor.of(server["model"])}, parts_of(server)
        if self.score_classifiers:
            count = depth_count(task, self.classifiers)
            for number in range(1, count + 1):
                found[f"classifier={number}"] = classified(parts, count, number - 1)
        return found

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        network = self.exits(client.task)
        depth, width = self.sizes(network.exits.count)[self.level(client.id, client.context)]
        own = network.padded(network.cut(parts_of(server), depth, width), width)
        return {**self.global_predictors(server, client.task), "submodel": self._predictor(network, own, width)}

    def _predictor(self, network: WideExits, parts: Parts, width: float) -> Predictor:
        """By the deepest classifier of a part."""
        own = network.scaled(parts, 1 / width) if self._scales else parts
        return classified(own, network.exits.count, -1)
