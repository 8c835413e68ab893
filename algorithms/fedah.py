"""FedAH: FedRep whose clients begin with a head mixed of their own and the averaged one, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import setting
from algorithms.parts.learned_mixture import LearnedMixture, mixture
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Predictor, Task


class FedAH(LearnedMixture):
    """FedAH: clients share body and head, and begin with an aggregated head that they then fit on their own.

    With w = (G, H) the received body and head, P_k the head that client k last trained and W_k in [0, 1] of its shape,
    client k makes three passes over its samples, each with the other tensors frozen:

        W_k <- tau_h epochs from W_k on CE(G, (1 - W_k) P_k + W_k H), clipped to [0, 1]
        P_k <- tau_h epochs from (1 - W_k) P_k + W_k H on CE(G, P_k)
        G_k <- E epochs from G on CE(G_k, P_k)

    The server takes means of (G_k, P_k): unlike FedRep's, its model has a head. Buffers (running statistics) are part
    of the body; what the first two passes record in them is dropped.

    Server: model w. Client: P_k, at first the head of the common initial model, and W_k, at first 1; W_k is never sent.
    Down: w. Up: (G_k, P_k) and n_k. Evaluated: w (``global``), and G with the head mixed by W_k learned
    for the latest w (``personalized``), which is not kept.

    References:
        Zhou, He, Zhai, Gao, Chen, Qin, Zhang, Guo: FedAH: Aggregated Head for Personalized Federated Learning, 2024
        (arXiv 2412.01295).
    """

    name: Literal["fedah"] = "fedah"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Zhou et al., 2024"
    client_keeps: ClassVar[str] = "P_k, W_k"
    newcomer: ClassVar[str] = "w, whose head is mixed with that of a local update"

    head_epochs: int | None = setting(
        1, "tau_h", "epochs of the weights, and of the head after them; null: train.local_epochs", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        head, trained = set(task.network.head_names), set(task.network.parameter_names)
        if not head & trained:
            raise ConfigError("fedah fits the head by itself, and this model trains nothing of it: choose another")
        if not trained - head:
            raise ConfigError(
                "fedah fits the body by itself, and no body is left: this model trains its head alone; choose another"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        network = client.task.network
        weights = await self.learned(client, model)
        begun = {**model, **mixture(self._own(client), model, weights)}
        head = [name for name in network.head_names if name in network.parameter_names]
        body = [name for name in network.parameter_names + network.buffer_names if name not in head]
        fitted = {**begun, **await self._trained(client, begun, head, self.head_epochs, "")}
        # without a head's pass the body's is the round's first
        stream = "" if self.head_epochs == 0 else ".1"
        trained = {**fitted, **await self._trained(client, fitted, body, None, stream)}
        client.state["head"], client.state["weights"] = copy(part(trained, head)), weights
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    async def _trained(
        self, client: Client, model: Tree, names: Sequence[str], epochs: int | None, stream: str
    ) -> Tree:
        """The named tensors after some epochs, with an optimizer of their own and the others frozen."""
        if epochs == 0:
            return part(model, names)
        # A training pass writes running statistics into the tensors it is given: they must be the client's own copy.
        moved = part(model, (*names, *client.task.network.buffer_names))
        objective = loss(TRAINED, completed_by="model")
        trained = await client.train(moved, objective, frozen={"model": model}, epochs=epochs, stream=stream)
        return part(trained, names)

    def _own(self, client: Client) -> Tree:
        """P_k."""
        stored: Tree | None = client.state.get("head")
        if stored is not None:
            return stored
        network = client.task.network
        head = [name for name in network.head_names if name in network.parameter_names]
        return part(client.initial_model(), head)

    async def learned(self, client: Client, model: Tree) -> Tree:
        """W_k for a received model."""
        own = self._own(client)
        weights: Tree = client.state.get("weights") or map_leaves(torch.ones_like, own)
        epochs = client.context.train.local_epochs if self.head_epochs is None else self.head_epochs
        if not epochs or not self.weight_lr:
            return weights
        return (await self.weights_pass(client, own, model, weights, epochs=epochs))[0]

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        mixed = mixture(self._own(client), model, await self.learned(client, model))
        return {"global": Predictor.of(model), "personalized": Predictor.of({**model, **mixed})}
