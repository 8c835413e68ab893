"""Adapters whose ranks differ from client to client: the first r_k rows of A and columns of B are client k's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.adapters import COMMON_FACTOR, check_both_factors
from algorithms.parts.capacities import drawn, in_turn
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task

A, B = ".lora_A.weight", ".lora_B.weight"
"""What the names of a layer's two factors end with."""


class OwnRanks(Algorithm):
    """A method whose clients may have adapters of unlike ranks.

    What travels has a client's own rank. A client trains its adapter with zeros up to the model's rank r, so that all
    clients of a stack are alike. A row of A and a column of B that are both zero have no gradient, and stay zero.
    """

    ranks: tuple[Annotated[int, Field(ge=1)], ...] | None = setting(
        None,
        "r_k",
        "ranks of the clients' adapters, none of them above the model's; null: model.adapter.r for all",
        min_length=1,
    )
    rank_choice: Literal["in_turn", "drawn"] = setting(
        "in_turn",
        "",
        "which of the ranks a client has: in_turn, client k the one at place k, and again from the first; drawn, each "
        "with the same probability",
        unless={"ranks": (None,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        network: Any = task.network
        check_both_factors(
            self.name,
            network,
            COMMON_FACTOR,
            "adapters are cut and combined by their products, which magnitudes divide by row norms",
        )
        if self.ranks is not None and max(self.ranks) > network.rank:
            raise ConfigError(
                f"algorithm.ranks has {max(self.ranks)}, but the model's adapters are of rank {network.rank}: set "
                f"model.adapter.r={max(self.ranks)}, or give smaller ranks"
            )
        if context.train.persist_optimizer:
            raise ConfigError(
                f"{self.name} needs train.persist_optimizer=false: what a row of an adapter stands for changes from "
                "round to round, so that the optimizer's buffers have no meaning in the next one"
            )

    def first_rank(self, client: int, most: int, context: RoundContext) -> int:
        """r_k before any round.

        Args:
            client: k; numbers of newcomers too.
            most: r, the model's rank.
            context: of the run.
        """
        if self.ranks is None:
            return most
        if self.rank_choice == "in_turn":
            return in_turn(self.ranks, client)
        return drawn(self.ranks, "ranks", client, context)


class SharedRanks(OwnRanks):
    """A method whose server has one adapter of rank r, of which client k is sent the first r_k ranks."""

    personalized: ClassVar[str] = "truncated"
    server_keeps: ClassVar[str] = "A, B"
    newcomer: ClassVar[str] = "the first r_k ranks of A and B"

    def ranks_of(self, server: Tree, clients: Sequence[int], context: RoundContext) -> dict[int, int]:
        """r_k of some clients."""
        most = rank_in(server["model"])
        return {client: self.first_rank(client, most, context) for client in clients}

    def trained_by(self, server: Tree, cohort: Sequence[int], clients: Clients) -> dict[int, Tree]:
        """Returns what the clients of a cohort make of their ranks of the server's model, by client."""
        ranks = self.ranks_of(server, cohort, clients.context)
        payloads = {client: {"model": cut(server["model"], ranks[client])} for client in cohort}
        return clients.map(self.local_update, cohort, {}, payloads)

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received ranks, and returns as many."""
        trained = await client.train(padded(model, whole_rank(client.task)), self.objective)
        client.publish(local=Predictor.of(trained))
        return cut(trained, rank_in(model))

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        ranks = self.ranks_of(server, [*range(context.num_clients), *context.newcomers], context)
        return {"model": server["model"]}, {client: {"rank": rank} for client, rank in ranks.items()}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        truncated = Predictor.of(cut(server["model"], server["rank"]))
        return {**self.global_predictors(server, client.task), "truncated": truncated}


def whole_rank(task: Task) -> int:
    """r, the rank of the model's adapters."""
    network: Any = task.network
    return int(network.rank)


def sites_of(model: Model) -> list[str]:
    """Names of the layers with adapters."""
    return [name.removesuffix(A) for name in model if name.endswith(A)]


def rank_in(model: Model) -> int:
    """The rank of a model's adapters."""
    return next(len(leaf) for name, leaf in model.items() if name.endswith(A))


def cut(model: Model, rank: int) -> Tree:
    """A model with the first ranks of its adapters alone."""
    if rank == rank_in(model):
        return dict(model)
    return {name: _first(name, leaf, rank) for name, leaf in model.items()}


def padded(model: Model, rank: int) -> Tree:
    """A model whose adapters have zeros up to a rank."""
    missing = rank - rank_in(model)
    if not missing:
        return dict(model)
    return {name: _longer(name, leaf, missing) for name, leaf in model.items()}


def _first(name: str, leaf: Tensor, rank: int) -> Tensor:
    if name.endswith(A):
        return leaf[:rank].clone()
    return leaf[:, :rank].clone() if name.endswith(B) else leaf


def _longer(name: str, leaf: Tensor, missing: int) -> Tensor:
    if name.endswith(A):
        return F.pad(leaf, (0, 0, 0, missing))
    return F.pad(leaf, (0, missing)) if name.endswith(B) else leaf


def head_of(model: Model) -> Tree:
    """A model without its adapters."""
    return {name: leaf for name, leaf in model.items() if not name.endswith((A, B))}


def weights_of(ids: Sequence[int], aggregation: str, clients: Clients) -> dict[int, int]:
    """p_k, not yet divided by their sum, by client.

    Args:
        ids: of the clients.
        aggregation: ``samples`` or ``uniform``.
        clients: they know their samples.
    """
    if aggregation == "uniform":
        return dict.fromkeys(ids, 1)
    return dict(zip(ids, clients.num_samples(ids).tolist(), strict=True))


def stacked(models: Mapping[int, Model], weights: Mapping[int, int], site: str) -> tuple[Tensor, Tensor]:
    """The mean of products as one product, [p_1 B_1, ..., p_n B_n] [A_1; ...; A_n]: both factors, float64.

    Args:
        models: by client; adapters may be of unlike ranks.
        weights: p_k, of any sum.
        site: the layer.
    """
    total = sum(weights.values())
    left = [models[client][site + B].double() * (weight / total) for client, weight in weights.items()]
    return torch.cat(left, 1), torch.cat([models[client][site + A].double() for client in weights])
