"""LoRA-FAIR: factors are averaged, and the server corrects B so that the product comes near to the mean product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.adapters import COMMON_FACTOR, check_both_factors
from algorithms.parts.corrected_factor import corrected
from algorithms.parts.means import mean_of
from algorithms.parts.ranks import A, B, sites_of, stacked, weights_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class LoRAFair(Algorithm):
    """LoRA-FAIR: factors are averaged, and the server corrects B so that the product comes near to the mean product.

    With the means A and B of the clients' factors and the mean product M of each layer,

        A = sum_k p_k A_k,    B = sum_k p_k B_k,    M = sum_k p_k B_k A_k,    p_k = n_k / sum_j n_j
        minimize over Delta    1 - cos(M, (B + Delta) A) + lambda ||Delta||

    where cos is the cosine of the angle between two matrices as vectors, and norms are Frobenius norms. Clients begin
    the next round with A and B + Delta (the paper's Avg-Initial). lambda holds them near to the mean of what clients
    had; large enough, Delta is zero, which is federated averaging (FedIT). A head that is trained is averaged.

    Server: A, B + Delta and the head. Client: nothing. Down: A, B + Delta and the head. Up: A_k, B_k and the head.
    Evaluated: the model.

    References:
        Bian, Wang, Zhang, Xu: LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement,
        ICCV 2025 (arXiv:2411.14961).
    """

    name: Literal["lora_fair"] = "lora_fair"
    citation: ClassVar[str] = "Bian et al., ICCV 2025"
    server_keeps: ClassVar[str] = "A, B, head"
    newcomer: ClassVar[str] = "the server's model"
    no_privacy: ClassVar[str] = "its server needs the factors of each client, of which it takes the products"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_k", "weights of the mean: samples n_k / sum over the cohort, or uniform"
    )
    correction_weight: float = setting(
        0.01,
        "lambda",
        "weight of the term that holds B + Delta near to B; 0: its limit, the smallest angle",
        ge=0,
        allow_inf_nan=False,
    )
    penalty: Literal["norm", "squared"] = setting(
        "norm",
        "",
        "that term: norm lambda ||Delta||, or squared lambda ||Delta||^2",
        unless={"correction_weight": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_both_factors(
            self.name,
            task.network,
            COMMON_FACTOR,
            "what a layer with magnitudes adds to the base is no product of factors that could be corrected",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        trained = clients.map(self.local_update, cohort, {"model": server["model"]})
        return {"model": self.combined(trained, weights_of(list(trained), self.aggregation, clients))}

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return trained

    def combined(self, trained: Mapping[int, Tree], weights: Mapping[int, int]) -> Tree:
        """The server's model of what clients trained.

        Args:
            trained: by client.
            weights: p_k, of any sum.
        """
        mean = mean_of(Weighted(trained[client], weight) for client, weight in weights.items())
        for site in sites_of(mean):
            products = stacked(trained, weights, site)
            squared = self.penalty == "squared"
            mean[site + B] = corrected(mean[site + B], mean[site + A], products, self.correction_weight, squared)
        return mean
