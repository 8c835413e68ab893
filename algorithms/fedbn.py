"""FedBN: federated averaging whose normalization layers stay with the clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from algorithms.fedavg import FineTuned
from rayfl.engine.client import Client
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class FedBN(FineTuned):
    """FedBN: federated averaging, except that every client keeps its own normalization layers.

    Scale, shift and running statistics of all normalization layers are trained and recorded by each client for
    itself. Everything else is averaged. The method is FedAvg with ``train.private_norm=all``, which it sets.

    Server: model w without its normalization layers. Client: its normalization layers, at first those of the initial
    model. Down: w. Up: w_k and n_k. Evaluated: the latest w with the client's own layers (``personalized``); a client
    never sampled has the initial layers. There is no global model.

    References:
        Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
        ICLR 2021, Algorithm 1.
    """

    name: Literal["fedbn"] = "fedbn"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Li et al., ICLR 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "norm_k"
    server_keeps: ClassVar[str] = "w without norm"
    newcomer: ClassVar[str] = "w, and normalization layers that it fits to that"
    no_private_norm: ClassVar[Mapping[str, str]] = {"statistics": "scales and shifts stay with its clients too"}
    train_settings: ClassVar[Mapping[str, Any]] = {"private_norm": "all"}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits the normalization layers, from the initial ones, while all else stays as it is."""
        model, network = server["model"], client.task.network
        own = {name: model[name] for name in network.norm_names}
        frozen = {"model": {name: leaf for name, leaf in model.items() if name not in own}}
        fitted = await client.train(own, loss(TRAINED, completed_by="model"), frozen=frozen, stream=".join")
        return {"model": {**model, **fitted}}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = await super().predictors(client, server)
        return {"personalized": rows.pop("global"), **rows}
