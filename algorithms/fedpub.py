"""FED-PUB: the server mixes the models of clients whose models make the same of random inputs; masks stay local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.partial import joined, part, separated
from algorithms.parts.random_inputs import random_inputs
from algorithms.parts.slopes import buffers
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.examples import InputSpec
from rayfl.objectives import Sum, function, squared_distance
from rayfl.params import TINY, Tree, copy, weighted_sums
from rayfl.tasks.base import Batch, Predictor, Task


def mixing_weights(embeddings: Tensor, scale: float) -> Tensor:
    """a_ij = exp(tau cos(h_i, h_j)) / sum_k exp(tau cos(h_i, h_k)); float64 of shape (m, m).

    Args:
        embeddings: h of each client, shape (m, f). The cosine of one that is zero is 0.
        scale: tau.
    """
    rows = embeddings.double()
    units = rows / rows.norm(dim=1, keepdim=True).clamp_min(TINY)
    return torch.softmax(scale * units @ units.T, dim=1)


class FedPub(Averaging):
    """FED-PUB (personalized subgraph FL): mixtures of clients with alike models, and a mask of each client's own.

    Client i has a mask mu_i of numbers, one for each element of the weight matrices and kernels, and trains its model
    and its mask together:

        CE(w_i * mu_i) + lambda_1 ||mu_i||_1 + lambda_2 ||w_i - u_i||^2

    from the received u_i. It also sends its functional embedding h_i: what the last layer reads, on average over random
    inputs that are the same for all clients (random graphs, if the model reads graphs), with the model that it has
    trained. The server mixes the models of the cohort for each of its clients,

        u_i = sum_j a_ij w_j,    a_ij = exp(tau cos(h_i, h_j)) / sum_k exp(tau cos(h_i, h_k)),

    which client i gets when it takes part again. A client that has not yet taken part gets the mean w. Biases have no
    mask. Buffers (running statistics) are averaged over the cohort. In use, elements of the mask below ``threshold``
    count as 0.

    Nothing of this needs graphs: any task and model will do.

    Server: w, and u_i of all clients that ever took part. Client: w_i and mu_i, which is never sent. Down: u_i. Up:
    w_i, h_i and n_i. Evaluated: w_i with its mask (``personalized``); a client never sampled has w.

    References:
        Baek, Jeong, Jin, Yoon, Hwang: Personalized Subgraph Federated Learning, ICML 2023.
    """

    name: Literal["fedpub"] = "fedpub"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send models and embeddings one by one, and the server compares them"
    citation: ClassVar[str] = "Baek et al., ICML 2023"
    client_keeps: ClassVar[str] = "w_k, mu_k"
    server_keeps: ClassVar[str] = "w, u_k"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "w, trained with a mask of its own"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "samples",
        "q_k",
        "weights of the mean: samples n_k / sum over the cohort; uniform 1/|S|; population n_k / sum over all clients, "
        "the rest staying on the old server model",
    )
    scale: float = setting(10.0, "tau", "how much more alike clients count; 0: all alike", ge=0)
    mask_weight: float = setting(1e-3, "lambda_1", "weight of the masks' absolute values", ge=0)
    proximal_weight: float = setting(1e-3, "lambda_2", "weight of the distance to the received mixture", ge=0)
    threshold: float = setting(1e-3, "", "elements of a mask that are smaller count as 0 in evaluations", ge=0)
    proxies: int = setting(100, "", "random inputs of an embedding; of graphs, their nodes", ge=1)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, task = server["model"], clients.task
        payloads = {client: {"model": self.received_by(client, server)} for client in cohort}
        sent = clients.map(self.masked_update, cohort, broadcast={}, payloads=payloads)
        if not sent:
            return {}
        trained = {client: one["trained"] for client, one in sent.items()}
        mean = mean_over_cohort(self, trained, separated(model, task.network), clients)
        weights = mixing_weights(torch.stack([one["embedding"] for one in sent.values()]), self.scale)
        mixtures = weighted_sums([one["parameters"] for one in trained.values()], weights)
        own = {**server.get("own", {}), **dict(zip(map(str, trained), mixtures, strict=True))}
        return {"model": joined(mean, model), "own": own}

    def received_by(self, client: int, server: Tree) -> Tree:
        """u_i with the latest buffers; w for a client that has not yet taken part."""
        return {**server["model"], **server.get("own", {}).get(str(client), {})}

    async def masked_update(self, client: Client, model: Tree) -> Tree:
        """Trains model and mask, and keeps both; returns the model, and its embedding."""
        own = await self._trained(client, model)
        used = self.pruned(own)
        client.publish(personalized=Predictor.of(used))
        proxies = self.drawn_proxies(client)
        read = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(used, x)[0], proxies)
        embedding = read.flatten(0, -2).double().mean(0).to(read)
        return {"trained": separated(own["model"], client.task.network), "embedding": embedding}

    def drawn_proxies(self, client: Client) -> Tensor:
        """The random inputs, the same for all clients and in all rounds."""
        own = client.examples().x
        spec = getattr(client.task, "spec", None) or InputSpec("image", tuple(own.shape[1:]), 1)
        return random_inputs(spec, self.proxies, client.context.streams.generator("proxies")).to(own)

    async def _trained(self, client: Client, model: Tree) -> Tree:
        masks = client.state.get("masks") or self.first_masks(model, client.task)
        start = {"model": model, "masks": masks}
        own = await client.train(start, self.objective, frozen={"received": model})
        client.state.update(copy(own))
        return own

    def first_masks(self, model: Tree, task: Task) -> Tree:
        """Ones for each element of matrices and kernels."""
        weights = part(model, task.network.parameter_names)
        return {name: torch.ones_like(leaf) for name, leaf in weights.items() if leaf.dim() > 1}

    @property
    def objective(self) -> Sum:
        """CE(w * mu) + lambda_1 ||mu||_1 + lambda_2 ||w - u||^2."""
        found = function(self._masked_loss)
        if self.proximal_weight:
            found += self.proximal_weight * squared_distance("model", "received")
        return found

    def _masked_loss(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        model, masks = trained["model"], trained["masks"]
        used = {**model, **{name: model[name] * mask for name, mask in masks.items()}}
        found: Tensor = task.loss({**used, **buffers(model, task)}, batch)
        if self.mask_weight:
            found = found + self.mask_weight * sum(mask.abs().sum() for mask in masks.values())
        return found

    def pruned(self, own: Tree) -> Tree:
        """The model as it is used: elements times their mask, where that is not below the threshold.

        Args:
            own: ``model`` and ``masks``.
        """
        model: Tree = own["model"]
        kept = {name: torch.where(mask.abs() < self.threshold, 0, mask) for name, mask in own["masks"].items()}
        return {**model, **{name: model[name] * mask for name, mask in kept.items()}}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains w with a mask as a client does in its first round, and sends nothing."""
        await self._trained(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = self.pruned(client.state) if "masks" in client.state else server["model"]
        return {"personalized": Predictor.of(own)}
