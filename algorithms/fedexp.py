"""FedExP: federated averaging whose server goes further than the mean, the less the clients agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, interpolate, squared_norm, subtract
from rayfl.tasks.base import Predictor, Task


def extrapolation(square: float, square_of_mean: float, epsilon: float) -> float:
    """eta_g = max(1, mean of ||Delta_k||^2 / (2 (||Delta||^2 + epsilon))).

    Args:
        square: the mean of ||Delta_k||^2.
        square_of_mean: ||Delta||^2, of the mean Delta of all Delta_k.
        epsilon: epsilon.
    """
    return max(1.0, square / (2 * (square_of_mean + epsilon)))


class FedExP(FineTuned):
    """FedExP (extrapolation): the server's step grows with how much longer the clients' changes are than their mean.

    With Delta_k = x_k - w, the change of a client's model, and Delta = sum_k q_k Delta_k,

        w <- w + eta_g Delta,    eta_g = max(1, sum_k q_k ||Delta_k||^2 / (2 (||Delta||^2 + epsilon)))

    Lengths are those of all parameters; buffers (running statistics) are averaged. The model that is evaluated is the
    mean of w and of the w before it, since w itself swings (``average``). With ``finetune_epochs`` each client
    fine-tunes the final one.

    Server: model w, and the one before it. Client: nothing. Down: w. Up: x_k, ||Delta_k||^2 and n_k.

    References:
        Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1.
    """

    name: Literal["fedexp"] = "fedexp"
    citation: ClassVar[str] = "Jhunjhunwala et al., ICLR 2023"
    no_example_privacy: ClassVar[str] = ""
    no_privacy: ClassVar[str] = "its clients send the squared norms of their changes, too"
    server_keeps: ClassVar[str] = "w, the w before it"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "lengths of changes are of all parameters, at the clients as at the server"
    }

    epsilon: float = setting(
        1e-3, "epsilon", "added to the square of the mean change; large: federated averaging", gt=0
    )
    average: bool = setting(True, "", "evaluated: the mean of the last two models (paper); false: the last one")

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "before": server["model"]} if self.average else server

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        here = parameters(model, clients.task)
        rest = self.remainder({"model": model, "square": squared_norm(here) * 0}, cohort, clients)
        mean = clients.mean(self.measured_update, cohort, broadcast={"model": model}, also=rest)
        there = {name: mean["model"][name] for name in here}
        length = float(squared_norm(subtract(there, here)))
        moved = interpolate(here, there, extrapolation(float(mean["square"]), length, self.epsilon))
        return {"model": {**mean["model"], **moved}, **({"before": model} if self.average else {})}

    async def measured_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model; returns it with the square of how far it went."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        change = subtract(parameters(trained, client.task), parameters(model, client.task))
        return self.weighted(client, {"model": trained, "square": squared_norm(change)})

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        if not self.average:
            return {"model": server["model"]}, {}
        return {"model": interpolate(server["before"], server["model"], torch.tensor(0.5))}, {}
