"""pFedMoAP: a context of each client, mixed by an attention of its own with the contexts of the clients nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.gating import first_gate, gated_products, reduced, reduced_width
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.prompts import check_context, clip_of, with_context
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.pretrained.text_head import CONTEXT
from rayfl.objectives import Sum, function, loss
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_AT_A_TIME = 256
"""Clients whose distances to all others are computed together."""


class PFedMoAP(Averaging):
    """pFedMoAP: clients download the contexts of others as fixed experts, and mix these with their own by attention.

    The server keeps the context that each client has last sent. In its first round a client trains the received
    context p on CE. In later ones it also receives the contexts of the N clients whose last ones are nearest to its
    own (Euclidean distance). With x an image's features, t_c(p_k) those of class c's text with its own context p_k,
    which begins at p, and t_c(p_j) those with the contexts received, it trains p_k and its gate G_k together on the CE
    of

        z_c = lambda s <x, t_c(p_k)> + s <x', m_c>,    m_c = G_k(x'; t'_c(p_k), t'_c(p_j) of its experts j)

    Primes are every r-th of the features, ``gate_width`` of them at most. G_k is attention with ``heads`` heads, whose
    query is the image, and whose keys and values are the experts' texts. The server averages the contexts p_k.
    Adapters in the image tower, if there are any, are shared and averaged with them.

    Server: context p, p_1..p_K as last sent. Client: p_k, and after its second round G_k, at first a draw that all
    clients have in common; G_k is never sent. Down: p, and at most N contexts. Up: p_k, and n_k. Evaluated: p_k with
    the gate and the nearest contexts of now, or p_k alone before there is a gate (``personalized``); p (``global``).
    A client never sampled has p.

    References:
        Luo, Chen, Wu: Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models, ICLR
        2025 (arXiv 2410.10114).
    """

    name: Literal["pfedmoap"] = "pfedmoap"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Luo et al., ICLR 2025"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the texts of CLIP tell classes"}
    no_privacy: ClassVar[str] = "the server hands the contexts of single clients to others"
    averages_replies: ClassVar[bool] = True
    keeps_models: ClassVar[bool] = True
    client_keeps: ClassVar[str] = "p_k, G_k"
    server_keeps: ClassVar[str] = "p, p_1..p_K"
    newcomer: ClassVar[str] = "p after a local update, without a gate"

    peers: int = setting(9, "N", "contexts of others that a client is sent at most", ge=0)
    local_weight: float = setting(
        0.5, "lambda", "weight of the logits of the client's own context alone", ge=0, unless={"peers": (0,)}
    )
    gate_width: int = setting(
        128,
        "g",
        "features of an image or a text that the gate reads at most",
        ge=1,
        unless={"peers": (0,)},
        kept=True,
    )
    heads: int = setting(8, "", "heads of the gate's attention", ge=1, unless={"peers": (0,)})
    sharpness: float = setting(
        10.0, "", "factor of the inner products in the attention's softmax", ge=0, unless={"peers": (0,)}
    )
    gate_lr: float | None = setting(
        None, "", "learning rate of the gate; null: that of the round", ge=0, unless={"peers": (0,)}
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_context("pFedMoAP", task.network)
        width = reduced_width(task.network.head_shape[1], self.gate_width)
        if self.peers and width % self.heads:
            raise ConfigError(
                f"algorithm.heads={self.heads}: the gate reads {width} features (algorithm.gate_width="
                f"{self.gate_width} of {task.network.head_shape[1]}), which cannot be cut into as many parts: choose "
                f"a divisor of {width}"
            )

    def kept_of_client(self, task: Task, clients: int) -> int:
        return num_bytes({name: leaf for name, leaf in task.network.initialize(0).items() if name == CONTEXT})

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, contexts = server["model"], server.get("contexts", {})
        experts = self.experts(contexts, [client for client in cohort if str(client) in contexts])
        payloads = {client: {"peers": experts.get(client, {})} for client in cohort}
        trained = clients.map(self.mixed_update, cohort, {"model": model}, payloads)
        own = {str(client): tree[CONTEXT] for client, tree in trained.items()}
        return {"model": mean_over_cohort(self, trained, model, clients), "contexts": {**contexts, **own}}

    def experts(self, contexts: Tree, clients: Sequence[int]) -> dict[int, Tree]:
        """The contexts that some clients are sent, by client.

        Args:
            contexts: as last sent, by client.
            clients: that have sent one.
        """
        chosen = nearest(contexts, clients, self.peers)
        return {client: {str(peer): contexts[str(peer)] for peer in peers} for client, peers in chosen.items()}

    async def mixed_update(self, client: Client, model: Tree, peers: Tree) -> Tree:
        """Trains the context, and the gate where there are experts; keeps both, and returns the model."""
        if peers:
            groups = {} if self.gate_lr is None else {"gate": ParameterGroup(lr=self.gate_lr)}
            constants = {"experts": await self.texts(client, model, peers)}
            both = {"model": model, "gate": self.gate(client)}
            # Not the stream of rounds without a gate, where an optimizer that is kept has trained other tensors.
            found = await client.train(both, self.objective, frozen=constants, groups=groups, stream=".gate")
            trained, client.state["gate"] = found["model"], found["gate"]
            client.publish(personalized=self.mixed(trained, found["gate"], constants["experts"]))
        else:
            trained = await client.train(model, loss())
            client.publish(personalized=Predictor.of(trained))
        client.state["context"] = trained[CONTEXT]
        return copy(trained)

    @property
    def objective(self) -> Sum:
        """The cross-entropy of what the context says alone and with its experts; it passes once through the tower."""
        return function(self._gated)

    def _gated(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        models = (trained["model"], trained["gate"], frozen)
        return task.loss_of(self._experts.logits(models, batch.x, task, training=True), batch)

    async def texts(self, client: Client, model: Tree, peers: Tree) -> Tensor:
        """t'_c(p_j) of all experts, shape (E, C, g), in the order of the clients' numbers."""
        contexts = torch.stack([peers[peer] for peer in sorted(peers, key=int)])
        found = await client.outputs(lambda rows, task: text_features(model, rows, task), contexts)
        return reduced(found, self.gate_width)

    def gate(self, client: Client) -> Tree:
        """G_k; before the client has trained one, a draw that is the same for all."""
        if "gate" in client.state:
            found: Tree = client.state["gate"]
            return found
        width = reduced_width(client.task.network.head_shape[1], self.gate_width)
        return first_gate(width, client.initial_model()[CONTEXT], client.context.streams.generator("init.gate"))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does in its first round, and sends nothing."""
        await self.mixed_update(client, server["model"], {})
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """The context, and to clients that have sent one those of their experts."""
        contexts = server.get("contexts", {})
        experts = self.experts(contexts, sorted(map(int, contexts)))
        return {"model": server["model"]}, {client: {"peers": peers} for client, peers in experts.items()}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model, peers = server["model"], server.get("peers", {})
        own = with_context(model, client.state["context"]) if "context" in client.state else model
        found = Predictor.of(own)
        if peers and "gate" in client.state:
            found = self.mixed(own, client.state["gate"], await self.texts(client, own, peers))
        return {"personalized": found, **self.global_predictors(server, client.task)}

    def mixed(self, model: Model, gate: Model, experts: Tensor) -> Predictor:
        """The prediction of a context and its experts.

        Args:
            model: with p_k.
            gate: G_k.
            experts: t'_c(p_j), shape (E, C, g).
        """
        return Predictor.of(model, gate, {"experts": experts}, combine=self._experts)

    @property
    def _experts(self) -> Experts:
        return Experts(self.local_weight, self.heads, self.sharpness)


@dataclass(frozen=True)
class Experts:
    """Predicts with a context, and with the texts that a gate mixes of its own and of other contexts.

    Attributes:
        local_weight: lambda.
        heads: of the gate.
        sharpness: of the gate.
    """

    local_weight: float
    heads: int
    sharpness: float

    def __call__(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        predicted: Tensor = task.predicted(self.logits(models, x, task, training=False))
        return predicted

    def logits(self, models: Sequence[Model], x: Tensor, task: Task, training: bool) -> Tensor:
        """Logits of shape (b, C).

        Args:
            models: the model with p_k, its gate, and ``experts``, t'_c(p_j) of shape (E, C, g).
            x: images, shape (b, *input shape).
            task: of the model.
            training: as for a network's logits.
        """
        model, gate, others = models
        network, experts = clip_of(task), others["experts"]
        width = experts.shape[-1]
        images, texts = network.features(model, x, training=training), network.text_features(model, training=training)
        everyone = torch.cat([reduced(texts, width)[None], experts])
        mixed = gated_products(gate, reduced(images, width), everyone, self.heads, self.sharpness)
        return network.text_scale * (self.local_weight * F.linear(images, texts) + mixed)


def nearest(contexts: Mapping[str, Tensor], clients: Sequence[int], count: int) -> dict[int, list[int]]:
    """The clients whose contexts are nearest to that of a client, ascending, by client; of equal ones the first.

    Args:
        contexts: by client.
        clients: who asks, each of which has a context.
        count: how many are wanted, fewer if there are fewer others.
    """
    everyone = sorted(map(int, contexts))
    found: dict[int, list[int]] = {}
    if not count or len(everyone) < 2:
        return {client: [] for client in clients}
    rows = torch.stack([contexts[str(client)].flatten() for client in everyone])
    for first in range(0, len(clients), _AT_A_TIME):
        asking = clients[first : first + _AT_A_TIME]
        own = torch.stack([contexts[str(client)].flatten() for client in asking])
        # Products in the place of differences would lose the digits in which contexts differ.
        distances = torch.cdist(own, rows, compute_mode="donot_use_mm_for_euclid_dist")
        for client, order in zip(asking, distances.argsort(dim=1, stable=True).tolist(), strict=True):
            found[client] = sorted([everyone[place] for place in order if everyone[place] != client][:count])
    return found


def text_features(model: Tree, contexts: Tensor, task: Task) -> Tensor:
    """Features of the texts with each of some contexts, shape (E, C, D).

    Args:
        model: whose other tensors count.
        contexts: shape (E, *shape of a context).
        task: of the model.
    """
    return torch.stack([clip_of(task).text_features(with_context(model, context)) for context in contexts])
