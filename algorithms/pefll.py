"""PeFLL: one network describes a client by its samples, another one makes the client's model from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.generators import linear
from algorithms.parts.hypernetworks import initial_hypernetwork, produced, produced_model, products
from algorithms.parts.partial import part
from algorithms.parts.settings import limits_without_effect
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.params import Tree, map_leaves, subtract
from rayfl.tasks.base import Batch, Predictor, Task, Trait


def embedded(embedding: Mapping[str, Any], task: Task, like: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """phi(x, y; eta_v), shape (b, e), by the features of the samples and their classes.

    Args:
        embedding: eta_v: ``body``, the trained tensors of a network like the clients', and two linear ``layers``.
        task: has the network.
        like: a whole model; its other tensors are constants.
        x: inputs, shape (b, ...).
        y: classes, shape (b,).
    """
    network = task.network
    features, _ = network.head_inputs_and_logits({**like, **embedding.get("body", {})}, x)
    both = torch.cat([features, F.one_hot(y, network.head_shape[0]).to(features)], -1)
    first, second = (embedding["layers"][name] for name in ("hidden", "out"))
    return F.linear(F.linear(both, first["weight"], first["bias"]).relu(), second["weight"], second["bias"])


class PeFLL(Algorithm):
    """PeFLL: a client's model is h(v_i; eta_h), where v_i is the mean of phi(x, y; eta_v) over the client's samples.

    A round has three exchanges. (1) The server sends eta_v, and the client answers with its descriptor v_i, of
    ``descriptor_batches`` mini-batches. (2) The server sends theta_i = h(v_i; eta_h), from which the client takes
    ``inner_steps`` local steps to x_i. With Delta_i = theta_i - x_i the server finds the gradient of

        1/|S| sum_{i in S} <Delta_i, h(v_i; eta_h)>,    Delta_i a constant,

    in eta_h, and of each summand in v_i. (3) The server sends the latter, and the client carries it on to eta_v, on the
    same samples, and sends that gradient. The server takes one step of Adam on both networks.

    phi is a network like the clients' up to its last layer, drawn for itself, whose features and the class of the
    sample go through two linear layers with ReLU between them; it runs in evaluation mode, with the running statistics
    of the initial model. h is as in pFedHN: a trunk of linear layers with ReLU between them, and one linear layer for
    each tensor of the model. Running statistics of x_i stay with the client.

    Server: eta_h, eta_v, both moments of Adam, the shift and scale of descriptors. Client: its running statistics.
    Down: eta_v, theta_i, the gradient in v_i. Up: v_i, x_i, the gradient in eta_v. eta_h is never sent. Evaluated:
    h(v_i) with v_i of all training samples (``personalized``), without a local step, also for clients never sampled
    and for newcomers; x_i (``local``). There is no global model.

    References:
        Scott, Zakerinia, Lampert: PeFLL: Personalized Federated Learning by Learning to Learn, ICLR 2024.
    """

    name: Literal["pefll"] = "pefll"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Scott et al., ICLR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "a sample is described by its class and its features",
        "features": "a sample is described by its class and its features",
    }
    server_keeps: ClassVar[str] = "eta_h, eta_v, moments of Adam"
    newcomer: ClassVar[str] = "h(v), with v of its own samples"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "statistics": "running statistics stay with the client anyway",
        "all": "the server makes the scales and shifts of each client's model",
    }

    inner_steps: int | None = setting(
        50, "k", "local steps, each on one mini-batch; null: train.local_epochs epochs", ge=0
    )
    descriptor_batches: int | None = setting(
        1, "", "mini-batches of which v_i is the mean in training; null: all training samples", ge=1
    )
    embedding_dim: int | None = setting(
        None, "l", "length of v_i; null: 1 + (number of clients) / 4, rounded down", ge=1
    )
    trunk_layers: int = setting(4, "", "linear layers of h's trunk; 0: h is linear in v_i", ge=0)
    hidden: int = setting(100, "", "width of the trunk's layers, and of phi's last but one", ge=1)
    standardize: bool = setting(
        True,
        "",
        "h reads (v_i - m) / s, with mean m and standard deviation s of the entries of the first descriptor of round 0",
        kept=True,
    )
    server_lr: float = setting(2e-4, "beta", "learning rate of Adam on the server", ge=0)
    server_max_grad_norm: float | None = setting(
        50.0, "", "largest norm of the gradient of both networks together; null: no limit", gt=0
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return limits_without_effect("inner_steps", self.inner_steps, context.train)

    def init(self, task: Task, context: RoundContext) -> Tree:
        network = task.network
        model = part(network.initialize(context.streams.integer("init.global")), network.parameter_names)
        length = 1 + context.num_clients // 4 if self.embedding_dim is None else self.embedding_dim
        generator = context.streams.generator("init.hyper")
        like, (classes, features) = next(iter(model.values())), network.head_shape
        layers = {
            "hidden": linear(features + classes, self.hidden, like, generator),
            "out": linear(self.hidden, length, like, generator),
        }
        body = part(network.initialize(context.streams.integer("init.embedding")), network.body_names)
        return {
            "generator": initial_hypernetwork(model, length, self.hidden, self.trunk_layers, generator),
            "embedding": {"body": body, "layers": layers} if body else {"layers": layers},
            "mean_and_deviation": torch.tensor([0, 1]).to(like),
            "memory": {},
        }

    def sent(self, server: Tree) -> Tree:
        return {"embedding": server["embedding"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return part(server, ("generator", "embedding", "mean_and_deviation")), {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        generator, embedding, scale = (server[name] for name in ("generator", "embedding", "mean_and_deviation"))
        replies = clients.map(self.describe, cohort, {"embedding": embedding})
        described = {str(k): replies[k]["descriptor"] for k in cohort}
        if self.standardize and clients.context.round == 0:
            scale = scale_of(described[str(cohort[0])])
        hyper = {"generator": generator, "scale": scale, "descriptors": described}
        made = clients.on_server(self.generate, hyper)
        trained = clients.map(self.local_update, cohort, {}, {k: {"model": made[str(k)]} for k in cohort})
        changes = {str(k): subtract(made[str(k)], trained[k]["model"]) for k in cohort}
        slopes = clients.on_server(self.slopes, {**hyper, "changes": changes})
        towards = {k: {"slope": slopes["descriptors"][str(k)]} for k in cohort}
        of_embedding = clients.mean(self.embedding_slope, cohort, {"embedding": embedding}, towards)
        found = clients.on_server(
            self.descend,
            {
                "networks": {"generator": generator, "embedding": embedding},
                "gradient": {"generator": slopes["generator"], "embedding": of_embedding},
                "memory": server.get("memory", {}),
            },
        )
        return {**found, "mean_and_deviation": scale}

    async def describe(self, client: Client, embedding: Tree) -> Tree:
        """v_i of the mini-batches of the round."""
        return {"descriptor": await self.descriptor(client, embedding, self.described(client))}

    def described(self, client: Client) -> Examples:
        """The samples of the round's mini-batches, or all."""
        samples = client.examples()
        if self.descriptor_batches is None:
            return samples
        order = client.batches(steps=self.descriptor_batches, stream=".descriptor").order.to(samples.y.device)
        return Examples(samples.x[order], samples.y[order])

    async def descriptor(self, client: Client, embedding: Tree, samples: Examples) -> Tensor:
        """The mean of phi over samples, shape (e,); zeros where there are none."""
        out, like = embedding["layers"]["out"]["bias"], client.initial_model()
        if not len(samples):
            return torch.zeros_like(out)
        rows = torch.arange(len(samples), device=samples.y.device)

        def function(rows: Tensor, task: Task) -> Tensor:
            return embedded(embedding, task, like, samples.x[rows], samples.y[rows])

        return (await client.outputs(function, rows)).mean(0)

    async def generate(self, server: Server, generator: Tree, scale: Tensor, descriptors: Tree) -> Tree:
        """theta_i by client."""
        return {k: produced_model(generator, (v - scale[0]) / scale[1], server) for k, v in descriptors.items()}

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received parameters."""
        trained = await client.train({**model, **_buffers(client)}, self.objective, steps=self.inner_steps)
        if client.task.network.buffer_names:
            client.state["buffers"] = part(trained, client.task.network.buffer_names)
        client.publish(local=Predictor.of(trained))
        return {"model": part(trained, model)}

    async def slopes(self, server: Server, generator: Tree, scale: Tensor, descriptors: Tree, changes: Tree) -> Tree:
        """The gradient in eta_h of the mean of <Delta_i, h(v_i)>, and by client that of its own summand in v_i.

        Args:
            server: the server.
            generator: eta_h.
            scale: m and s.
            descriptors: v_i by client.
            changes: Delta_i by client.
        """
        rows = map_leaves(lambda *leaves: torch.stack([leaf.flatten() for leaf in leaves]), *changes.values())

        def total(generator: Tree, described: Tensor) -> Tensor:
            made = produced(generator, (described - scale[0]) / scale[1])
            return torch.stack(list(products(made, rows))).sum()

        described = torch.stack(list(descriptors.values()))
        of_generator, of_descriptors = torch.func.grad(total, argnums=(0, 1))(generator, described)
        mean = map_leaves(lambda leaf: leaf / len(described), of_generator)
        return {"generator": mean, "descriptors": dict(zip(descriptors, of_descriptors, strict=True))}

    async def embedding_slope(self, client: Client, embedding: Tree, slope: Tensor) -> Weighted:
        """The gradient of <slope, v_i> in eta_v, on the samples that gave v_i."""
        samples = self.described(client)
        if not len(samples):
            return Weighted(map_leaves(torch.zeros_like, embedding), 1)
        constants = {"slope": slope, "like": client.initial_model()}
        return Weighted(await client.gradient(embedding, self.pull, frozen=constants, examples=samples), 1)

    def pull(self, embedding: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """<slope, v>, with v the mean of phi over the mini-batch."""
        found: Tensor = frozen["slope"] @ embedded(embedding, task, frozen["like"], batch.x, batch.y).mean(0)
        return found

    async def descend(self, server: Server, networks: Tree, gradient: Tree, memory: Tree | None = None) -> Tree:
        """Both networks and Adam's moments after a step along a gradient.

        Args:
            server: the server.
            networks: eta_h and eta_v.
            gradient: of the same tensors.
            memory: the moments; none before the first round.
        """
        server.state["optimizer"] = memory or {}
        rule = TrainConfig(optimizer="adam", lr=self.server_lr, max_grad_norm=self.server_max_grad_norm)
        moved = await server.train(
            networks, self.along, frozen={"gradient": gradient}, steps=1, settings=rule, keep_optimizer=True
        )
        return {**moved, "memory": server.state["optimizer"]}

    def along(self, networks: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """<gradient, networks>, whose gradient is the one given."""
        parts: list[Tensor] = []
        map_leaves(lambda slope, leaf: parts.append((slope * leaf).sum()), frozen["gradient"], networks)
        return torch.stack(parts).sum()

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        v = await self.descriptor(client, server["embedding"], client.examples())
        shift, scale = server["mean_and_deviation"]
        made = produced_model(server["generator"], (v - shift) / scale, client)
        return {"personalized": Predictor.of({**made, **_buffers(client)})}


def scale_of(descriptor: Tensor) -> Tensor:
    """Mean and standard deviation of a vector's entries; 0 and 1 where these do not differ."""
    spread = descriptor.std() if len(descriptor) > 1 else descriptor.new_zeros(())
    return torch.stack([descriptor.mean(), spread]) if spread > 0 else descriptor.new_tensor([0, 1])


def _buffers(client: Client) -> Tree:
    """The client's running statistics, those of the initial model until it has trained."""
    stored: Tree | None = client.state.get("buffers")
    return part(client.initial_model(), client.task.network.buffer_names) if stored is None else stored
