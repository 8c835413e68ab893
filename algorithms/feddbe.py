"""FedDBE: a private bias vector among the features, and a pull of mean features to a common mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.accumulators import ACCUMULATOR, averaging, check_unclipped
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedDBE(Averaging):
    """FedDBE: federated averaging with the domain bias eliminator, which takes out of features what is a client's own.

    With f(x) in R^d the input of the last linear layer, a client adds a vector m_k of its own to the features, and its
    mean features are pulled to a mean that is common and fixed. A step goes down

        CE(head(f + m_k)) + kappa/d 1/2 ||r - zbar||^2,    r <- (1 - beta) [r] + beta mean_b f

    where the bracket is a constant, mean_b is over the mini-batch and r is 0 at the beginning of every local update.
    Model and m_k are trained together, with one learning rate.

    Before round 0 every client, sampled or not, trains a copy of the initial model on the cross-entropy, and sends the
    r that it then has; zbar is the mean of these, weighted by samples. The copies are dropped. With kappa = 0 there is
    no such start.

    Server: model w, zbar. Client: m_k, at first 0; never sent. Down: w and zbar. Up: w_k and n_k; at the start r_k.
    Evaluated: w (``global``) and w with m_k (``personalized``), which are the same for a client never sampled; after
    training both with w_k (``local``, ``personalized``).

    References:
        Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation
        Space, NeurIPS 2023, its personalized representation bias memory (m_k) and mean regularization.
    """

    name: Literal["feddbe"] = "feddbe"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send mean features, too, weighted by their samples"
    citation: ClassVar[str] = "Zhang et al., NeurIPS 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a mean of the features of samples is kept apart"}
    client_keeps: ClassVar[str] = "m_k"
    server_keeps: ClassVar[str] = "w, zbar"
    newcomer: ClassVar[str] = "w, and m_k after a local update"

    mean_weight: float = setting(50.0, "kappa", "weight of the pull of mean features; 0: none, and no start", ge=0)
    mean_momentum: float = setting(
        1.0, "beta", "share of a mini-batch in the running mean of features", gt=0, le=1, unless={"mean_weight": (0,)}
    )
    vector_lr: float | None = setting(
        None, "", "learning rate of the bias vector; null: that of the round, 0: no bias vector", ge=0
    )
    start_epochs: int | None = setting(
        None,
        "",
        "epochs of the copies before round 0; null: train.local_epochs, 0: mean features of the initial model",
        ge=0,
        unless={"mean_weight": (0,)},
        kept=True,
    )
    start_mean: Literal["running", "all"] = setting(
        "running",
        "",
        "what a client sends at the start: its running mean (official code; with mean_momentum=1 that of one "
        "mini-batch), or the mean over all its samples at the trained copy",
        unless={"mean_weight": (0,), "start_epochs": (0,)},
        kept=True,
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedDBE", task.network)
        if self.mean_weight > 0 and self.mean_momentum < 1:
            check_unclipped("FedDBE", "algorithm.mean_momentum below 1", context)
        elif self.mean_weight > 0 and self.start_mean == "running" and self._epochs(context):
            check_unclipped("FedDBE", "algorithm.start_mean=running", context)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        pull = {"mean": server["mean"]} if "mean" in server else {}
        if self.mean_weight > 0 and not pull:
            everyone = range(clients.context.num_clients)
            pull = clients.mean(self.statistics, everyone, broadcast={"model": model}, required=True)
        rest = self.remainder(model, cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast={"model": model, **pull}, also=rest)
        return {"model": mean, **pull}

    async def statistics(self, client: Client, model: Tree) -> Weighted:
        """r_k: mean features of a copy of the model, which the client trains and drops."""
        epochs, running = self._epochs(client.context), torch.zeros_like(model[client.task.network.head_weight][0])
        if epochs:
            trained = await client.train(
                {"model": model, "running": running},
                self.start_objective,
                groups={"running": ACCUMULATOR},
                epochs=epochs,
                keep_optimizer=False,
                stream=".statistics",
            )
            model, running = trained["model"], trained["running"]
        if self.start_mean == "all" or not epochs:
            features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
            running = features.double().mean(0).to(running)
        return Weighted({"mean": running}, client.num_samples)

    async def local_update(self, client: Client, model: Tree, mean: Tensor | None = None) -> Weighted:
        start = {"model": model, "vector": self._own(client, model)}
        groups = {"vector": ParameterGroup(lr=self.vector_lr)}
        if mean is not None and self.mean_momentum < 1:
            start["running"], groups["running"] = torch.zeros_like(mean), ACCUMULATOR
        trained = await client.train(
            start,
            self.objective,
            frozen=None if mean is None else {"mean": mean},
            groups=groups,
        )
        client.state["vector"] = trained["vector"]
        client.publish(local=Predictor.of(trained["model"]), personalized=_shifted(trained["model"], trained["vector"]))
        return self.weighted(client, trained["model"])

    @property
    def objective(self) -> Sum:
        """The cross-entropy at the shifted features, and the pull of their mean before the shift."""
        return function(self._pulled)

    @property
    def start_objective(self) -> Sum:
        """The cross-entropy, and what keeps the running mean."""
        return function(self._tracked)

    def _pulled(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        model = trained["model"]
        features, logits = task.head_inputs_and_logits(model, batch)
        # head(f + m) = head(f) + V m
        value = task.loss_of(logits + model[task.network.head_weight] @ trained["vector"], batch)
        if frozen is None:
            return value
        mean = _mean(features, batch)
        running = self.mean_momentum * mean
        if "running" in trained:
            running = running + (1 - self.mean_momentum) * trained["running"].detach()
            value = value + averaging(trained["running"], mean, self.mean_momentum)
        distance: Tensor = (running - frozen["mean"]).square().mean() / 2
        return value + self.mean_weight * distance

    def _tracked(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        return task.loss_of(logits, batch) + averaging(trained["running"], _mean(features, batch), self.mean_momentum)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["model"], server.get("mean"))
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "personalized": _shifted(model, self._own(client, model))}

    def _epochs(self, context: RoundContext) -> int:
        """Epochs of the start."""
        return context.train.local_epochs if self.start_epochs is None else self.start_epochs

    @staticmethod
    def _own(client: Client, model: Model) -> Tensor:
        """m_k, 0 until the client has trained; shape (d,)."""
        stored: Tensor | None = client.state.get("vector")
        return torch.zeros_like(model[client.task.network.head_weight][0]) if stored is None else stored


def _mean(features: Tensor, batch: Batch) -> Tensor:
    """The mean over the samples of a mini-batch, shape (d,)."""
    if batch.mask is None:
        return features.mean(0)
    total: Tensor = batch.mask @ features
    return total / batch.mask.sum()


def _shifted(model: Model, vector: Tensor) -> Predictor:
    """The prediction with a vector added to the features."""
    return Predictor.of(model, {"vector": vector}, combine=_predictions)


def _predictions(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Returns what (model, bias vector) predict."""
    model, own = models
    logits = task.network.logits(model, x, training=False) + model[task.network.head_weight] @ own["vector"]
    found: Tensor = task.predicted(logits)
    return found
