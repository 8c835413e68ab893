"""FedACG: the server sends its model ahead along its momentum, and clients stay near where they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree, add_scaled, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


class FedACG(FineTuned):
    """FedACG (accelerated client gradient): clients begin where the server's momentum is about to take the model.

    The server sends its model w moved ahead along its momentum m. Clients start there and minimise CE with a proximal
    term that holds them near that point:

        v = w + lambda m
        CE + beta/2 ||theta - v||^2
        m <- lambda m + Delta,    Delta = sum_k q_k (theta_k - v)
        w <- w + m

    So the new w is the mean of the clients' models, and m its distance from the old one. The gradients of a round are
    taken at v, as in Nesterov's method. lambda = 0 is federated averaging with a proximal term (FedProx), and with
    beta = 0, too, federated averaging. Momentum exists for parameters; buffers (running statistics) are averaged.
    Momentum of the training section is the clients' own.

    Server: model w and m, zero at first. Client: nothing. Down: v. Up: theta_k and n_k. Evaluated: w (``global``).
    With ``finetune_epochs`` each client fine-tunes the final w on the cross-entropy alone.

    References:
        Kim, Kim, Han: Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024
        (arXiv 2201.03172); formulas of the authors' code.
    """

    name: Literal["fedacg"] = "fedacg"
    citation: ClassVar[str] = "Kim et al., CVPR 2024"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "w, m"

    server_momentum: float = setting(
        0.85, "lambda", "momentum of the server, along which it looks ahead; 0 is FedProx", ge=0, lt=1
    )
    proximal_weight: float = setting(0.002, "beta", "weight of the proximal term", ge=0)
    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on v",
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "momentum": zeros_like(parameters(server["model"], task))}

    def summed(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, momentum = server["model"], server["momentum"]
        old = {name: model[name] for name in momentum}
        # without momentum nothing is added, not even zeros
        ahead = {**model, **add_scaled(old, momentum, self.server_momentum)} if self.server_momentum else model
        rest = self.remainder(ahead, cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast={"model": ahead}, also=rest)
        return {"model": mean, "momentum": subtract({name: mean[name] for name in old}, old)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains near the received v."""
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """CE + beta/2 ||theta - v||^2."""
        return loss() + self.proximal_weight * proximity("half_squared", TRAINED, "received")

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
