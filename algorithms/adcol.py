"""ADCOL: models of the clients' own, whose features a discriminator at the server shall not tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.accumulators import ACCUMULATOR, averaging
from algorithms.parts.layers import draw_linear
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_EPSILON, _SHARE = 1e-5, 0.1
_NO_TERM = {"adversarial_weight": (0,)}

_HIDDEN = ("first", "second")


class ADCOL(Algorithm):
    """ADCOL: every client trains a model of its own, so that the server cannot tell from features whose they are.

    With f(x) in R^d the input of the last linear layer, and D the server's discriminator, which gives each feature
    vector a distribution over the K clients, client k trains its own model v_k, and the server then trains D, on

        clients:    CE + mu mean KL(u || D(f(x))),    u_j = 1/K
        server:     mean -log D(f_k(x))_k    over the features of the cohort

    D has two hidden layers, each with batch normalization and ReLU, and no biases in its linear layers. D is held still
    at the clients, where it normalizes by the server's running statistics. A client sends the features of all its
    training samples, which its trained model gives in evaluation mode; neither labels nor any part of the model.

    Server: D with its running statistics. Client: v_k, at first the common initial model; never sent. Down: D. Up: the
    features, shape (n_k, d). Evaluated: v_k (``personalized``); a client never sampled has its initial model. There is
    no global model. With mu = 0 it is local training, and nothing travels; without server epochs D travels alone.

    References:
        Li, He, Song: Adversarial Collaborative Learning on Non-IID Features, ICML 2023.
    """

    name: Literal["adcol"] = "adcol"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Li et al., ICML 2023"
    no_privacy: ClassVar[str] = "its clients send features of each of their samples"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a discriminator learns whose features it reads"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "D"
    newcomer: ClassVar[str] = "a model that it trains with the discriminator"

    adversarial_weight: float = setting(0.5, "mu", "weight of the divergence from the uniform distribution", ge=0)
    divergence: Literal["from_uniform", "to_uniform"] = setting(
        "from_uniform", "KL", "that divergence: KL(u || D(f)), or KL(D(f) || u)", unless=_NO_TERM
    )
    discriminator_hidden: int = setting(512, "h", "width of D's two hidden layers", ge=1, kept=True)
    server_epochs: int = setting(3, "", "passes of the server over the features in a round", ge=0, unless=_NO_TERM)
    server_lr: float = setting(
        0.01, "", "learning rate of the server's plain SGD", ge=0, unless={"server_epochs": (0,), **_NO_TERM}
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        like = next(iter(task.network.initialize(context.streams.integer("init.global")).values()))
        drawn, hidden = context.streams.generator("init.discriminator"), self.discriminator_hidden
        widths = (task.network.head_shape[1], hidden, hidden, context.num_clients)
        layers = [{"matrix": draw_linear(*pair, like, drawn)["matrix"]} for pair in pairwise(widths)]
        network = dict(zip((*_HIDDEN, "third"), layers, strict=True))
        for name in _HIDDEN:
            network[name] |= {"gain": like.new_ones(hidden), "offset": like.new_zeros(hidden)}
        statistics = {name: {"mean": like.new_zeros(hidden), "variance": like.new_ones(hidden)} for name in _HIDDEN}
        return {"discriminator": {"network": network, "statistics": statistics}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        replies = clients.map(self.local_update, cohort, broadcast=self.sent(server))
        if not self._learns:
            return {}
        labels = [torch.full((len(reply["features"]),), client) for client, reply in replies.items()]
        given = {"features": torch.cat([reply["features"] for reply in replies.values()]), "labels": torch.cat(labels)}
        return clients.on_server(self.fit, {**self.sent(server), **given})

    async def local_update(self, client: Client, discriminator: Tree | None = None) -> Tree:
        """Trains the client's own model; returns its features, shape (n_k, d), if the server learns from them."""
        frozen = {"discriminator": discriminator} if discriminator else {}
        trained = await client.train(self.own(client), self.objective, frozen=frozen)
        client.state["local"] = trained
        client.publish(personalized=Predictor.of(trained))
        if not self._learns:
            return {}
        return {"features": await client.outputs(lambda x, task: _features(task, trained, x))}

    @property
    def objective(self) -> Sum:
        """The cross-entropy and mu times the divergence, from one forward pass."""
        return function(self._disguised) if self.adversarial_weight else loss()

    def _disguised(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        known = frozen["discriminator"]
        recognised, _ = discriminated(known["network"], features, known["statistics"])
        apart = divergence(recognised.log_softmax(-1), reverse=self.divergence == "to_uniform")
        value: Tensor = task.loss_of(logits, batch) + self.adversarial_weight * batch.mean(apart)
        return value

    async def fit(self, server: Server, discriminator: Tree, features: Tensor, labels: Tensor) -> Tree:
        """The discriminator after the server's epochs.

        Args:
            server: the server.
            discriminator: D.
            features: of the cohort's samples, shape (n, d).
            labels: whose they are, shape (n,).
        """
        trained = await server.train(
            discriminator,
            self.recognition,
            examples=Examples(features, labels),
            epochs=self.server_epochs,
            settings=TrainConfig(batch_size=server.context.train.batch_size, lr=self.server_lr),
            groups={"statistics": ACCUMULATOR},
        )
        return {"discriminator": trained}

    def recognition(self, discriminator: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The server's loss of a mini-batch of features, and running means of the hidden layers' statistics."""
        logits, found = discriminated(discriminator["network"], batch.x)
        value = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        unbiased = len(batch.y) / max(len(batch.y) - 1, 1)
        for name, kept in discriminator["statistics"].items():
            value = value + averaging(kept["mean"], found[name]["mean"], _SHARE)
            value = value + averaging(kept["variance"], unbiased * found[name]["variance"], _SHARE)
        return value

    def own(self, client: Client) -> Tree:
        """v_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("local")
        return client.initial_model() if stored is None else stored

    def sent(self, server: Tree) -> Tree:
        return server if self.adversarial_weight else {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Nothing: clients have their models. Newcomers, which train before they are scored, get D."""
        return {}, {newcomer: self.sent(server) for newcomer in context.newcomers}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, **server)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self.own(client))}

    @property
    def _learns(self) -> bool:
        """Whether the server trains D, which needs features."""
        return self.adversarial_weight > 0 and self.server_epochs > 0


def discriminated(
    network: Mapping[str, Any], features: Tensor, statistics: Mapping[str, Any] | None = None
) -> tuple[Tensor, Mapping[str, Any]]:
    """Returns D's logits, shape (b, K), and ``mean`` and ``variance`` by which its hidden layers were normalized.

    Args:
        network: of D: ``matrix``, ``gain`` and ``offset`` of its layers.
        features: shape (b, d).
        statistics: those to normalize by, by layer; default the mini-batch's own, with the biased variance.
    """
    hidden, used = features, {}
    for name in _HIDDEN:
        layer = network[name]
        hidden = F.linear(hidden, layer["matrix"])
        if statistics is None:
            used[name] = {"mean": hidden.mean(0), "variance": hidden.var(0, unbiased=False)}
        else:
            used[name] = statistics[name]
        scale = (used[name]["variance"] + _EPSILON).rsqrt() * layer["gain"]
        hidden = ((hidden - used[name]["mean"]) * scale + layer["offset"]).relu()
    return F.linear(hidden, network["third"]["matrix"]), used


def divergence(logarithms: Tensor, reverse: bool = False) -> Tensor:
    """KL(u || D) in nats, or reverse KL(D || u), of each sample, shape (b,); u is uniform.

    Args:
        logarithms: log D, shape (b, K).
        reverse: which of the two.
    """
    uniform = torch.full_like(logarithms[0], 1 / logarithms.shape[-1]).log()
    if reverse:
        return (logarithms.exp() * (logarithms - uniform)).sum(-1)
    return (uniform - logarithms).mean(-1)


def _features(task: Any, model: Tree, x: Tensor) -> Tensor:
    features: Tensor = task.network.head_inputs_and_logits(model, x, training=False)[0]
    return features
