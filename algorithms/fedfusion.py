"""FedFusion: local training on a fusion of local and received features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedFusion(Averaging):
    """FedFusion: clients train on a fusion of their own features with those of the received model.

    With u the features of the client's model, v those of the received one (a constant in evaluation mode) and c
    channels, the classifier sees

        single: (1 - g) u + g v with one g;   multi: the same with g in R^c;   conv: W [u; v] + b with W in R^(c x 2c),

    alike at every position of a feature map; without a map (``feature_channels`` of the network is None) every
    feature is a channel, and ``conv`` a linear layer. Model and fusion module F are trained on the cross-entropy
    and averaged. Of g the server then takes the moving average (1 - s) g_new + s g_old.

    Server: model w and F, at first g = 0 or W and b as PyTorch draws those of a convolution. Client: nothing. Down:
    w and F. Up: w_k, F_k and n_k. Evaluated: w and F with u = v (``global``); after training w_k and F_k with the
    received features (``local``), which is the personalized model of FedPHP's comparison.

    The authors' code means uniformly, keeps the clients' momentum on MNIST, and evaluates the server's model with the
    extractor of the round before as v.

    References:
        Yao, Huang, Wu, Zhang, Sun: Towards Faster and Better Federated Learning: A Feature Fusion Approach, ICIP
        2019, the operators conv, multi and single.
    """

    name: Literal["fedfusion"] = "fedfusion"
    citation: ClassVar[str] = "Yao et al., ICIP 2019"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "it fuses the features of two models"}
    server_keeps: ClassVar[str] = "w, F"

    operator: Literal["conv", "multi", "single"] = setting(
        "conv", "F", "fusion: 1x1 convolution of both features, or their mixture with one g a channel or one in all"
    )
    smoothing: float = setting(
        0.9,
        "s",
        "share of the server's old g in its new one (multi, single); 0 takes the clients' mean",
        ge=0,
        le=1,
        only={"operator": ("multi", "single")},
        unless={"fusion_lr": (0,)},
    )
    fusion_lr: float | None = setting(
        None, "eta_F", "learning rate of the fusion module; null: that of the model, 0: the module stays as it is", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        network = task.network
        if self.operator == "single" or network.feature_channels is not None:
            return
        model = network.initialize(0)
        try:
            network.classify(model, next(iter(model.values())).new_zeros(1, _channels(task)))
        except RuntimeError as error:
            raise ConfigError(
                f"algorithm.operator {self.operator} has a weight for every channel of the features, whose number the "
                "model does not tell: set feature_channels on the model class, or algorithm.operator=single"
            ) from error

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        like = next(iter(server["model"].values()))
        if self.operator == "single":
            return {**server, "fusion": {"gate": like.new_zeros(())}}
        channels = _channels(task)
        if self.operator == "multi":
            return {**server, "fusion": {"gate": like.new_zeros(channels)}}
        generator = context.streams.generator("init.fusion")
        bound = 1 / math.sqrt(2 * channels)
        shapes = {"weight": (channels, 2 * channels), "bias": (channels,)}
        drawn = {name: torch.from_numpy(generator.uniform(-bound, bound, shape)) for name, shape in shapes.items()}
        return {**server, "fusion": {name: leaf.to(like) for name, leaf in drawn.items()}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared = {"model": server["model"], "fusion": server["fusion"]}
        rest = self.remainder(shared, cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast={"model": shared}, also=rest)
        if self.operator != "conv":
            mean["fusion"] = interpolate(mean["fusion"], server["fusion"], self.smoothing)
        return mean

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model and fusion module."""
        received = model["model"]
        rule = ParameterGroup(lr=self.fusion_lr)
        trained = await client.train(model, self.objective, frozen={"received": received}, groups={"fusion": rule})
        client.publish(local=Predictor.of(trained["model"], received, trained["fusion"], combine=_fused_prediction))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        own = task.features(model["model"], batch)
        received = task.features(frozen["received"], batch, training=False)
        logits = task.classify(model["model"], fused(own, received, model["fusion"], task))
        return task.loss_of(logits, batch)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model, model, server["fusion"], combine=_fused_prediction)}


def fused(own: Tensor, received: Tensor, fusion: Mapping[str, Tensor], task: Task) -> Tensor:
    """F(u, v).

    Args:
        own: u, features of shape (b, f) as the network flattens them.
        received: v, of the same shape.
        fusion: ``gate`` of shape () or (c,), or ``weight`` (c, 2c) and ``bias`` (c,).
        task: tells how many channels the features have.

    Returns:
        Features of shape (b, f).
    """
    channels = task.network.feature_channels or own.shape[1]
    u, v = (features.reshape(len(features), channels, -1) for features in (own, received))
    if "gate" in fusion:
        mixed = u + fusion["gate"][..., None] * (v - u)
    else:
        mixed = torch.matmul(fusion["weight"], torch.cat([u, v], dim=1)) + fusion["bias"][:, None]
    return mixed.flatten(1)


def _fused_prediction(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Returns what (local model, received model, fusion module) predict."""
    local, received, fusion = models
    network = task.network
    own, other = (network.features(model, x, training=False) for model in (local, received))
    found: Tensor = task.predicted(network.classify(local, fused(own, other, fusion, task), training=False))
    return found


def _channels(task: Task) -> int:
    """c; of features that are no map f, which the head takes as they are."""
    return task.network.feature_channels or task.network.head_shape[1]
