"""FedCM: local steps mixed with the mean step of the last round, which the server sends along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from algorithms.base import Clients, check_sgd, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product, loss
from rayfl.params import Tree, interpolate, map_leaves, zeros_like
from rayfl.tasks.base import Predictor, Task


class FedCM(FineTuned):
    """FedCM: federated averaging with momentum in the clients' steps, the same for all: the last round's mean step.

    Client i of the cohort S starts at the received x_t and takes K_i local steps

        v = alpha g + (1 - alpha) Delta_t,    x_i <- x_i - eta_l v

    with g the gradient of its mini-batch. With the weights q_i the server takes

        Delta_{t+1} = sum_i q_i (x_t - x_i) / (eta_l K),    K = sum_i q_i K_i
        x_{t+1} = x_t - eta_g eta_l K Delta_{t+1}

    so that Delta has the scale of a gradient. It is zero at first. In the paper K is the same for all, q_i = 1/|S|, and
    its server's rate is what is written eta_g eta_l K here: eta_g = 1 goes to the mean of the clients' models. Where
    clients take different numbers of steps, one K for all makes Delta the mean of v over all local steps of the round,
    in which a client counts by q_i K_i, as it does in the model. alpha = 1 is federated averaging.

    Each round is divided by its own eta_l. Delta exists for parameters; buffers (running statistics) are averaged.
    Weight decay is added to v, and so is part of Delta. Momentum of the training section would be a second one, and
    is refused. A round without steps of positive length keeps Delta. With ``finetune_epochs`` each client fine-tunes
    the final model by plain steps.

    Server: model x and Delta. Client: nothing. Down: x and Delta. Up: x_i and n_i. Evaluated: x.

    References:
        Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum, arXiv:2106.10874, 2021, Algorithm 1.
    """

    name: Literal["fedcm"] = "fedcm"
    citation: ClassVar[str] = "Xu et al., arXiv 2021"
    no_privacy: ClassVar[str] = "its server divides by the cohort's mean number of local steps, which has no noise"
    server_keeps: ClassVar[str] = "x, Delta"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there is no mean step of a parameter that is never sent; statistics is possible"
    }

    alpha: float = setting(
        0.1,
        "alpha",
        "weight of the client's own gradient; 1 is federated averaging, 1 - alpha that of Delta",
        gt=0,
        le=1,
    )
    server_lr: float = setting(1.0, "eta_g", "step of the server; 1 goes to the mean of the clients' models", gt=0)
    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_i",
        "weights of the means: uniform 1/|S| (paper); samples n_i / sum over the cohort; population n_i / sum over all "
        "clients, the rest staying on x_t",
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        reason = "it divides the distance moved by eta_l K, which is a mean step after plain steps alone"
        check_sgd("FedCM", context.train, reason, heavy_ball=True)
        if context.train.momentum > 0:
            raise ConfigError(
                f"FedCM's momentum is Delta, to which train.momentum={context.train.momentum} would add a second one: "
                "set train.momentum=0"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if context.train.max_grad_norm is None:
            return ()
        return ("train.max_grad_norm shortens v, the sum of gradient and Delta, not the gradient alone",)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "momentum": zeros_like(parameters(server["model"], task))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, momentum, context = server["model"], server["momentum"], clients.context
        rest = self.remainder(model, cohort, clients)
        mean = clients.mean(self.mixed_update, cohort, broadcast={"model": model, "momentum": momentum}, also=rest)
        start, end = ({name: tree[name] for name in momentum} for tree in (model, mean))
        length = context.train.lr_in(context.round) * self.mean_steps(cohort, clients)
        if length > 0:
            momentum = map_leaves(lambda before, after: (before - after) / length, start, end)
        return {"model": {**mean, **interpolate(start, end, self.server_lr)}, "momentum": momentum}

    def mean_steps(self, cohort: Sequence[int], clients: Clients) -> float:
        """K, the sum of the cohort's numbers of local steps, weighted as the models are."""
        samples = clients.num_samples(cohort)
        pairs = zip(cohort, samples.tolist(), strict=True)
        steps = np.array([clients.context.steps_of(client, int(n)) for client, n in pairs])
        if self.aggregation == "uniform":
            return float(steps.mean())
        counted = range(clients.context.num_clients) if self.aggregation == "population" else cohort
        return float(samples @ steps / clients.num_samples(counted).sum())

    async def mixed_update(self, client: Client, model: Tree, momentum: Tree) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            model: x_t.
            momentum: Delta_t, of the parameters.
        """
        trained = await client.train(model, self.objective, frozen={"momentum": momentum})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """alpha f(x) + (1 - alpha) <x, Delta>, whose gradient is v."""
        return self.alpha * loss() + (1 - self.alpha) * inner_product(TRAINED, "momentum")

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
