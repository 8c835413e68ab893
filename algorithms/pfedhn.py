"""pFedHN: the server trains a network that makes every client's model from an embedding of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, check_head, setting
from algorithms.parts.hypernetworks import initial_hypernetwork, produced, produced_model, products
from algorithms.parts.partial import part
from algorithms.parts.settings import limits_without_effect
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, map_leaves, subtract
from rayfl.tasks.base import Batch, Predictor, Task


class PFedHN(Algorithm):
    """pFedHN: the server learns a hypernetwork h and an embedding v_i of each client, whose model is h(v_i).

    The server sends theta_i = h(v_i; phi), from which the client takes ``inner_steps`` local steps to x_i. With
    Delta_i = theta_i - x_i the server takes one step of SGD on phi and all embeddings along the gradient of

        1/|S| sum_{i in S} <Delta_i, h(v_i; phi)>,    Delta_i a constant.

    h is a trunk of linear layers with ReLU between them, and one linear layer for each tensor of the model. With
    ``private_head`` (pFedHN-PC) h makes all but the last linear layer, which each client keeps and trains in the same
    steps, with an optimizer that goes on from round to round. Running statistics stay with the client.

    Server: phi, v_i of all clients, and their momentum. Client: with ``private_head`` its last layer; its running
    statistics. Down: theta_i. Up: x_i. phi and v_i are never sent. Evaluated: h(v_i) (``personalized``), without a
    local step, also for clients never sampled; x_i (``local``). There is no global model.

    References:
        Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021, Algorithm 1.
    """

    name: Literal["pfedhn"] = "pfedhn"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Shamsian et al., ICML 2021"
    client_keeps: ClassVar[str] = "- (its head)"
    server_keeps: ClassVar[str] = "phi, v_i of all clients, momentum"
    newcomer: ClassVar[str] = "h(v) for a v that it fits, while phi stays as it is"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "statistics": "running statistics stay with the client anyway",
        "all": "the server makes the scales and shifts of each client's model",
    }

    private_head: bool = setting(False, "PC", "clients keep their last linear layer, which the server does not make")
    inner_steps: int | None = setting(
        50, "K", "local steps, each on one mini-batch; null: train.local_epochs epochs", ge=0
    )
    embedding_dim: int | None = setting(
        None, "e", "length of v_i; null: 1 + (number of clients) / 4, rounded down", ge=1
    )
    trunk_layers: int = setting(4, "", "linear layers of the trunk; 0: h is linear in v_i", ge=0)
    hidden: int = setting(100, "", "width of the trunk's layers", ge=1, unless={"trunk_layers": (0,)})
    server_lr: float = setting(0.01, "alpha", "learning rate of phi", ge=0)
    embedding_lr: float | None = setting(None, "", "learning rate of the embeddings; null: that of phi", ge=0)
    server_momentum: float = setting(0.9, "", "momentum of the server's SGD", ge=0, lt=1)
    server_weight_decay: float = setting(1e-3, "", "weight decay of the server's SGD", ge=0)
    server_max_grad_norm: float | None = setting(
        50.0, "", "largest norm of the gradient of phi and embeddings together; null: no limit", gt=0
    )
    server_steps: Literal["per_round", "per_client"] = setting(
        "per_round", "", "one step along the mean over the cohort, or one for each of its clients in ascending order"
    )
    embedding_update: Literal["all", "selected"] = setting(
        "all",
        "",
        "embeddings that weight decay and momentum move: all clients', as in dense SGD, or those of the step's clients",
        unless={"server_momentum and server_weight_decay": ((0, 0),)},
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return limits_without_effect("inner_steps", self.inner_steps, context.train)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if not self.private_head:
            return
        check_head("pFedHN-PC", task.network)
        if not self.made(task.network):
            raise ConfigError(
                "algorithm.private_head keeps the last layer from the server, which is all that this model trains, so "
                "that no body is left: choose a model with more layers, or set algorithm.private_head=false"
            )
        if context.train.persist_optimizer:
            raise ConfigError(
                "train.persist_optimizer: with algorithm.private_head the private layer's optimizer goes on in later "
                "rounds, that of what is received does not; drop it"
            )

    def made(self, network: Network) -> list[str]:
        """Names of the parameters that h makes."""
        kept = network.head_names if self.private_head else ()
        return [name for name in network.parameter_names if name not in kept]

    def init(self, task: Task, context: RoundContext) -> Tree:
        generator = context.streams.generator("init.hyper")
        model = part(task.network.initialize(context.streams.integer("init.global")), self.made(task.network))
        like = next(iter(model.values()))
        clients = context.num_clients
        length = 1 + clients // 4 if self.embedding_dim is None else self.embedding_dim
        embeddings = torch.from_numpy(generator.standard_normal((clients, length))).to(like)
        phi = initial_hypernetwork(model, length, self.hidden, self.trunk_layers, generator)
        return {"generator": phi, "embeddings": embeddings, "memory": {}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        network = {"generator": server["generator"], "embeddings": server["embeddings"]}
        sent = clients.on_server(self.generate, {**network, "clients": torch.tensor(list(cohort))})
        replies = clients.map(self.local_update, cohort, {}, {k: {"model": sent[str(k)]} for k in cohort})
        changes = {str(k): subtract(sent[str(k)], replies[k]["model"]) for k in cohort}
        return clients.on_server(self.descend, {**network, "memory": server.get("memory", {}), "changes": changes})

    async def generate(self, server: Server, generator: Tree, embeddings: Tensor, clients: Tensor) -> Tree:
        """theta_i by client."""
        return {str(k): produced_model(generator, embeddings[k], server) for k in clients.tolist()}

    async def descend(
        self, server: Server, generator: Tree, embeddings: Tensor, changes: Tree, memory: Tree | None = None
    ) -> Tree:
        """phi, embeddings and momentum after the server's steps.

        Args:
            server: the server.
            generator: phi.
            embeddings: v_i of all clients, of shape (K, e).
            changes: Delta_i by client.
            memory: momentum; none before the first round.
        """
        trained: Tree = {"generator": generator, "embeddings": embeddings}
        momentum = memory or {}
        steps = [[client] for client in changes] if self.server_steps == "per_client" else [list(changes)]
        for chosen in steps:
            before, earlier_momentum = trained, momentum
            server.state["optimizer"] = momentum
            trained = await server.train(
                trained,
                self.objective,
                frozen=_stacked({client: changes[client] for client in chosen}, embeddings),
                steps=1,
                settings=TrainConfig(
                    lr=self.server_lr,
                    momentum=self.server_momentum,
                    weight_decay=self.server_weight_decay,
                    max_grad_norm=self.server_max_grad_norm,
                ),
                groups={"embeddings": ParameterGroup(lr=self.embedding_lr)},
                keep_optimizer=True,
            )
            momentum = server.state["optimizer"]
            if self.embedding_update == "selected":
                rows = torch.tensor([int(client) for client in chosen], device=embeddings.device)
                trained = _moved_only_at(rows, trained, before)
                momentum = {
                    name: _moved_only_at(rows, tree, earlier_momentum.get(name, {})) for name, tree in momentum.items()
                }
        return {**trained, "memory": momentum}

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The mean over the step's clients of <Delta_i, h(v_i; phi)>."""
        made = produced(model["generator"], model["embeddings"][frozen["clients"]])
        return torch.stack(list(products(made, frozen["changes"]))).sum() / len(frozen["clients"])

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received parameters, and with them the client's own layer."""
        network = client.task.network
        received = {**model, **self._own(client, "buffers", network.buffer_names)}
        if self.private_head:
            start = {"shared": received, "personal": self._own(client, "personal", network.head_names)}
            found = await client.train(start, self.joint_loss, steps=self.inner_steps, keep_optimizer={"personal"})
            client.state["personal"], trained = found["personal"], {**found["shared"], **found["personal"]}
        else:
            trained = await client.train(received, self.local_loss, steps=self.inner_steps)
        if network.buffer_names:
            client.state["buffers"] = part(trained, network.buffer_names)
        client.publish(local=Predictor.of(trained))
        return {"model": part(trained, model)}

    @property
    def local_loss(self) -> Any:
        """The loss of the whole model."""
        return super().objective

    def joint_loss(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the received parameters and the client's own layer."""
        return task.loss({**model["shared"], **model["personal"]}, batch)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        network = client.task.network

        def whole() -> Tree:
            made = produced_model(server["generator"], self._embedding(client, server), client)
            own = self._own(client, "personal", network.head_names) if self.private_head else {}
            return {**made, **own, **self._own(client, "buffers", network.buffer_names)}

        return {"personalized": Predictor.of(whole)}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits an embedding, from the mean of all, while h stays as it is; its own layers with it."""
        network = client.task.network
        own = self._own(client, "buffers", network.buffer_names)
        if self.private_head:
            own |= self._own(client, "personal", network.head_names)
        found = await client.train(
            {"embedding": self._embedding(client, server), **({"own": own} if own else {})},
            self.fitting_loss,
            frozen={"generator": server["generator"], "like": part(client.initial_model(), self.made(network))},
            stream=".join",
        )
        client.state["embedding"] = found["embedding"]
        if network.buffer_names:
            client.state["buffers"] = part(found["own"], network.buffer_names)
        if self.private_head:
            client.state["personal"] = part(found["own"], network.head_names)
        return {}

    def fitting_loss(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of h(v) and the client's own layers as a function of v and these."""
        made = produced(frozen["generator"], model["embedding"])
        whole = {name: flat.view_as(frozen["like"][name]) for name, flat in made.items()}
        return task.loss({**whole, **model.get("own", {})}, batch)

    @staticmethod
    def _embedding(client: Client, server: Tree) -> Tensor:
        """v_i; of a newcomer the one that it fitted, or the mean of all."""
        if "embedding" in client.state:
            fitted: Tensor = client.state["embedding"]
            return fitted
        embeddings: Tensor = server["embeddings"]
        return embeddings.mean(0) if client.id in client.context.newcomers else embeddings[client.id]

    @staticmethod
    def _own(client: Client, key: str, names: Sequence[str]) -> Tree:
        """Returns what of its model the client keeps, that of the initial one until it has trained."""
        stored: Tree | None = client.state.get(key)
        return part(client.initial_model(), names) if stored is None else stored


def _stacked(changes: Tree, embeddings: Tensor) -> Tree:
    """The changes of some clients with a row for each, and the clients' numbers."""
    rows = map_leaves(lambda *leaves: torch.stack([leaf.flatten() for leaf in leaves]), *changes.values())
    return {"changes": rows, "clients": torch.tensor([int(client) for client in changes], device=embeddings.device)}


def _moved_only_at(rows: Tensor, new: Tree, old: Tree) -> Tree:
    """The new tree with the old embeddings of all clients but ``rows``; zeros where there were none."""
    before = old["embeddings"] if "embeddings" in old else torch.zeros_like(new["embeddings"])
    return {**new, "embeddings": before.index_copy(0, rows, new["embeddings"][rows])}
