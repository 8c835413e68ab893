"""FedALA: before training, the received model is mixed into the client's own, with weights learned on its samples."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import setting
from algorithms.parts.learned_mixture import LearnedMixture, mixture
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import num_steps
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import loss
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Predictor, Task


class FedALA(LearnedMixture):
    """FedALA: federated averaging whose clients initialise element by element from the received and their own model.

    With w the received model, a_k the last p layers of the model that client k last trained, and W_k in [0, 1] of their
    shape, the client's training begins at

        theta: (1 - W_k) a_k + W_k w  in the last p layers,  w below

    Before that, W_k makes steps of gradient descent on the cross-entropy at theta, over a share s of the samples and
    clipped to [0, 1], with nothing else moved: one pass in every round, and in a client's second participation, the
    first with an a_k, as many as it takes until the loss settles (start). A first participation begins at w.

    Server: model w. Client: a_k, W_k, at first 1; never sent. Down: w. Up: w_k and n_k. Evaluated: w (``global``) and
    theta with W_k learned for the latest w (``personalized``), which is not kept; for a client never sampled that is w.

    References:
        Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning,
        AAAI 2023, Algorithm 1 and eqs. 4 (theta) and 5 (steps of W_k).
    """

    name: Literal["fedala"] = "fedala"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Zhang et al., AAAI 2023"
    client_keeps: ClassVar[str] = "a_k, W_k"
    newcomer: ClassVar[str] = "w, mixed with the upper layers of a local update"

    layers: int = setting(1, "p", "layers, from the last one, that are mixed element by element", ge=1, kept=True)
    data_share: float = setting(
        0.8,
        "s",
        "share of the samples that a pass of the weights uses, up to a whole mini-batch",
        gt=0,
        le=1,
        unless={"weight_lr": (0,)},
    )
    start_threshold: float | None = setting(
        0.1,
        "",
        "the start ends when the standard deviation of the last losses is below this; null: after start_passes passes",
        gt=0,
        unless={"weight_lr": (0,)},
    )
    start_window: int = setting(
        10,
        "",
        "how many last losses, one a pass, that of its last mini-batch",
        ge=2,
        unless={"weight_lr": (0,), "start_threshold": (None,)},
    )
    start_passes: int = setting(100, "", "largest number of passes of the start", ge=1, unless={"weight_lr": (0,)})

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        available = len(task.network.layers)
        if self.layers > available:
            raise ConfigError(
                f"algorithm.layers is {self.layers}, but the model trains {available} layers: choose at most as many"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        upper = self.upper(client.task.network)
        weights = await self.learned(client, model)
        trained = await client.train(self.mixed(client, model, weights), loss())
        client.state["upper"] = copy(part(trained, upper))
        if weights is not None:
            client.state["weights"] = weights
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def upper(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters of the last p layers."""
        return tuple(name for layer in network.layers[-self.layers :] for name in layer)

    def mixed(self, client: Client, model: Tree, weights: Tree | None) -> Tree:
        """theta; the received model where there are no weights."""
        return model if weights is None else {**model, **mixture(client.state["upper"], model, weights)}

    async def learned(self, client: Client, model: Tree) -> Tree | None:
        """W_k for a received model; None for a client that has not trained yet."""
        if "upper" not in client.state:
            return None
        stored: Tree | None = client.state.get("weights")
        if stored is not None:
            return (await self._pass(client, model, stored))[0]
        weights, losses = map_leaves(torch.ones_like, client.state["upper"]), list[float]()
        while len(losses) < self.start_passes and not self._settled(losses):
            weights, last = await self._pass(client, model, weights)
            losses.append(last)
        return weights

    def _settled(self, losses: list[float]) -> bool:
        if self.start_threshold is None or len(losses) <= self.start_window:
            return False
        return bool(np.std(losses[-self.start_window :]) < self.start_threshold)

    async def _pass(self, client: Client, model: Tree, weights: Tree) -> tuple[Tree, float]:
        """One pass of the weights over their share of the samples, and the loss of its last mini-batch."""
        train, samples = client.context.train, client.num_samples
        once = num_steps(samples, train.batch_size, 1, train.drop_last)
        steps = min(math.ceil(self.data_share * samples / (train.batch_size or samples)), once) if once else 0
        return await self.weights_pass(client, client.state["upper"], model, weights, steps=steps)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        personal = self.mixed(client, model, await self.learned(client, model))
        return {"global": Predictor.of(model), "personalized": Predictor.of(personal)}
