"""FLoRA: the adapters of all clients are stacked and added to the base, and begin afresh in every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.adapters import adapters_of, added_and_rest
from algorithms.parts.means import mean_of
from algorithms.parts.ranks import (
    A,
    B,
    OwnRanks,
    cut,
    head_of,
    padded,
    sites_of,
    stacked,
    weights_of,
    whole_rank,
)
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.pretrained.mixing import delta_name
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class FLoRA(OwnRanks):
    """FLoRA: the adapters of all clients are stacked and added to the base, and begin afresh in every round.

    Client k draws an adapter of rank r_k, with B_k = 0, and trains it over what all rounds so far have added to the
    base, which stays as it is. The server stacks what clients send, whatever their ranks, and adds it:

        y = (W + D) x + s B_k A_k x
        D <- D + s [p_1 B_1, ..., p_n B_n] [A_1; ...; A_n] = D + s sum_k p_k B_k A_k,    p_k = n_k / sum_j n_j

    This is the mean of what clients add to the base, without the error of averaged factors. The weights p_k are on
    one factor alone. A head that is trained is averaged, and goes on.

    Server: D of every layer with adapters, and the head. Client: nothing. Down: D and the head. Up: A_k, B_k and the
    head. Evaluated: W + D with the head (``global``).

    References:
        Wang, Shen, He, Sun, Wang, Lyu, Li: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
        Low-Rank Adaptations, NeurIPS 2024 (arXiv:2409.05976).
    """

    name: Literal["flora"] = "flora"
    citation: ClassVar[str] = "Wang et al., NeurIPS 2024"
    server_keeps: ClassVar[str] = "D, head"
    newcomer: ClassVar[str] = "W + D"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_k", "weights of the mean: samples n_k / sum over the cohort, or uniform"
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        """The initial model, whose adapters add nothing from here on: what they add is D."""
        model, network = super().init(task, context)["model"], _adapted(task)
        deltas = {
            delta_name(site): network.scale * (model[site + B].double() @ model[site + A].double()).float()
            for site in sites_of(model)
        }
        return {"model": {**without_products(model), **deltas}}

    def sent(self, server: Tree) -> Tree:
        """D and the head."""
        deltas, rest = added_and_rest(server["model"])
        return {"added": deltas, "head": head_of(rest)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        trained = clients.map(self.local_update, cohort, self.sent(server))
        weights = weights_of(list(trained), self.aggregation, clients)
        return {"model": self.combined(server["model"], trained, weights, _adapted(clients.task).scale)}

    async def local_update(self, client: Client, added: Tree, head: Tree) -> Tree:
        """Trains a new adapter of rank r_k and the received head."""
        most = whole_rank(client.task)
        rank = self.first_rank(client.id, most, client.context)
        start = {**padded(cut(self.drawn(client), rank), most), **head}
        trained = await client.train(start, self.objective, frozen={"added": added})
        client.publish(local=Predictor.of({**trained, **added}))
        return cut(trained, rank)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of the base, D and the client's adapter; the latter is trained."""
        return task.loss({**model, **frozen["added"]}, batch)

    @staticmethod
    def drawn(client: Client) -> Tree:
        """An adapter of the model's rank: a draw of the client and round, with B = 0."""
        network, like = client.task.network, next(iter(client.initial_model().values()))
        seed = client.context.streams.integer("init.adapters", client.round, client.id)
        fresh = {name: leaf.to(like) for name, leaf in adapters_of(network.initialize(seed), network).items()}
        return without_products(fresh)

    @staticmethod
    def combined(old: Model, trained: Mapping[int, Model], weights: Mapping[int, int], scale: float) -> Tree:
        """The server's model after a round.

        Args:
            old: before it.
            trained: by client, of their own ranks.
            weights: p_k, of any sum.
            scale: s.
        """
        found = {**old, **mean_of(Weighted(head_of(trained[client]), weight) for client, weight in weights.items())}
        for site in sites_of(old):
            left, right = stacked(trained, weights, site)
            name = delta_name(site)
            found[name] = (old[name].double() + scale * (left @ right)).to(old[name])
        return found


def without_products(model: Model) -> Tree:
    """A model whose adapters add nothing: every B is zero."""
    return {name: torch.zeros_like(leaf) if name.endswith(B) else leaf for name, leaf in model.items()}


def _adapted(task: Task) -> Any:
    """The network, which has a scale."""
    return task.network
