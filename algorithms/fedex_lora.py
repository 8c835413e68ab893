"""FedEx-LoRA: factors are averaged, and what their mean lacks of the mean product is added to the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.adapters import COMMON_FACTOR, added_and_rest, check_both_factors
from algorithms.parts.means import mean_of
from algorithms.parts.ranks import A, B, sites_of, stacked, weights_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.pretrained.mixing import delta_name
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class FedExLoRA(Algorithm):
    """FedEx-LoRA: factors are averaged, and what their mean lacks of the mean product is added to the base.

    Clients go on from the mean factors, as in federated averaging (FedIT), over the base and all that has been added to
    it. The product of two means is not the mean of the products; the server adds the difference,

        y = (W + D) x + s B_k A_k x
        A <- sum_k p_k A_k,    B <- sum_k p_k B_k,    p_k = n_k / sum_j n_j
        D <- D + s (sum_k p_k B_k A_k - B A)

    so that W + D + s B A is the mean of the clients' layers W + D + s B_k A_k. Of one client, and of clients that have
    one factor in common, the difference is zero. With n clients of rank r it has rank (n - 1) r at most. A head that is
    trained is averaged.

    Server: A, B, D of every layer with adapters, and the head. Client: nothing. Down: A, B, D and the head. Up: A_k,
    B_k and the head. Evaluated: W + D + s B A with the head (``global``).

    References:
        Singhal, Ponkshe, Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
        Language Models, ACL 2025 (arXiv:2410.09432).
    """

    name: Literal["fedex_lora"] = "fedex_lora"
    citation: ClassVar[str] = "Singhal et al., ACL 2025"
    server_keeps: ClassVar[str] = "A, B, D, head"
    newcomer: ClassVar[str] = "W + D + s B A"
    no_privacy: ClassVar[str] = "its server needs the factors of each client, of which it takes the products"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_k", "weights of the mean: samples n_k / sum over the cohort, or uniform"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_both_factors(
            self.name,
            task.network,
            COMMON_FACTOR,
            "what is added to the base would change the norms by which a layer's rows are divided",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        deltas = {
            delta_name(site): torch.zeros(len(model[site + B]), model[site + A].shape[1]).to(model[site + A])
            for site in sites_of(model)
        }
        return {"model": {**model, **deltas}}

    def sent(self, server: Tree) -> Tree:
        """D, and the model that is trained."""
        deltas, model = added_and_rest(server["model"])
        return {"added": deltas, "model": model}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        trained = clients.map(self.local_update, cohort, self.sent(server))
        network: Any = clients.task.network
        weights = weights_of(list(trained), self.aggregation, clients)
        return {"model": self.combined(server["model"], trained, weights, network.scale)}

    async def local_update(self, client: Client, added: Tree, model: Tree) -> Tree:
        """Trains the received adapter and head over W + D."""
        trained = await client.train(model, self.objective, frozen={"added": added})
        client.publish(local=Predictor.of({**trained, **added}))
        return trained

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of the base, D and the client's adapter; the latter is trained."""
        return task.loss({**model, **frozen["added"]}, batch)

    @staticmethod
    def combined(old: Model, trained: Mapping[int, Tree], weights: Mapping[int, int], scale: float) -> Tree:
        """The server's model after a round.

        Args:
            old: before it.
            trained: by client.
            weights: p_k, of any sum.
            scale: s.
        """
        found = {**old, **mean_of(Weighted(trained[client], weight) for client, weight in weights.items())}
        for site in sites_of(old):
            left, right = stacked(trained, weights, site)
            # of the means as they are stored: what rounding takes from them is added here
            lacking = left @ right - found[site + B].double() @ found[site + A].double()
            name = delta_name(site)
            found[name] = (old[name].double() + scale * lacking).to(old[name])
        return found
