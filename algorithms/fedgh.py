"""FedGH: bodies of the clients' own, under a head that the server trains on their class means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, check_head, setting
from algorithms.parts.architectures import task_of
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_means
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait


def head_step(head: Tree, features: Tensor, labels: Tensor, lr: float) -> Tree:
    """A gradient step of a linear layer on the mean cross-entropy.

    Args:
        head: ``weight`` (C, d) and, if there is one, ``bias`` (C,).
        features: of shape (m, d).
        labels: of shape (m,).
        lr: learning rate.
    """
    probabilities = F.linear(features, head["weight"], head.get("bias")).softmax(-1)
    errors = (probabilities - F.one_hot(labels, len(head["weight"]))) / len(labels)
    slopes = {"weight": errors.T @ features, "bias": errors.sum(0)}
    return {name: leaf - lr * slopes[name] for name, leaf in head.items()}


class FedGH(Algorithm):
    """FedGH: every client has a body of its own, and the server trains the head that all start from.

    A client joins the received head W with its body B_k and minimises CE(B_k, W_k) over both, W_k starting from W. It
    keeps B_k, drops W_k, and sends the mean features mu_ky of each class y it has, from all its samples at the trained
    body in evaluation mode. The server goes down the cross-entropy of W on all pairs (mu_ky, y) of the cohort, with
    plain SGD over mini-batches of ``train.batch_size`` of them. Every class mean weighs the same. Features are what
    the head reads, the last linear layer. Clients may have different architectures (``model.candidates``) with heads of
    one shape, each a draw of the client's own.

    Server: head W. Client: body B_k with its buffers, at first the initial one of its architecture; never sent. Down:
    W. Up: mu_ky, and a mark for each class that there is. Evaluated: B_k with the latest W (``personalized``), and
    right after training (B_k, W_k) (``local``); a client never sampled has the initial body. There is no global model.

    References:
        Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM 2023,
        Algorithm 1.
    """

    name: Literal["fedgh"] = "fedgh"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Yi et al., ACM MM 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the server learns from mean features by class"}
    client_keeps: ClassVar[str] = "B_k"
    server_keeps: ClassVar[str] = "W"
    newcomer: ClassVar[str] = "W, and a body after a local update"
    mixes_architectures: ClassVar[bool] = True

    server_lr: float | None = setting(
        None,
        "eta_W",
        "learning rate of the server's training of the head; null: the clients' of the round",
        ge=0,
        unless={"server_epochs": (0,)},
    )
    server_epochs: int = setting(1, "", "passes of the server over the class means", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        heads = []
        for candidate in task.candidates:
            check_head("FedGH", candidate.network, bias=True)
            heads.append((candidate.network.head_shape, len(candidate.network.head_names) > 1))
        if len(set(heads)) > 1:
            found = ", ".join(f"{inputs} inputs{' and a bias' * biased}" for (_, inputs), biased in heads)
            raise ConfigError(
                f"FedGH's clients share their last layer, but those of model.candidates differ ({found}): choose "
                "models whose last layers have as many inputs, and a bias in all of them or in none"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"shared": part(model, task.network.head_names)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        replies = clients.map(self.local_update, cohort, broadcast={"shared": server["shared"]})
        exist = [reply["exist"] > 0 for reply in replies.values()]
        features = torch.cat([reply["means"][own] for reply, own in zip(replies.values(), exist, strict=True)])
        labels = torch.cat([own.nonzero()[:, 0] for own in exist])
        context = clients.context
        generator = context.streams.generator("server", context.round)
        rate = context.train.lr_in(context.round) if self.server_lr is None else self.server_lr
        return {"shared": self.fitted(server["shared"], features, labels, rate, context.train.batch_size, generator)}

    def fitted(
        self,
        head: Tree,
        features: Tensor,
        labels: Tensor,
        lr: float,
        batch_size: int | None,
        generator: np.random.Generator,
    ) -> Tree:
        """The head after the server's passes over the class means.

        Args:
            head: W, by the names in the model.
            features: class means, shape (m, d).
            labels: their classes, shape (m,).
            lr: learning rate.
            batch_size: class means in a mini-batch; null: all.
            generator: orders them.
        """
        named = {name.rpartition(".")[2]: name for name in head}
        layer = {short: head[name] for short, name in named.items()}
        for _ in range(self.server_epochs):
            order = torch.from_numpy(generator.permutation(len(labels)))
            for chosen in torch.split(order, batch_size or len(labels)):
                layer = head_step(layer, features[chosen], labels[chosen], lr)
        return {name: layer[short] for short, name in named.items()}

    async def local_update(self, client: Client, shared: Tree) -> Tree:
        """Trains the whole model and keeps the body; returns class means and marks."""
        task = task_of(client)
        trained = await client.train(self.assembled(client, shared), self.objective, task=task)
        own_names = task.network.body_names + task.network.buffer_names
        client.state["personal"] = part(trained, own_names)
        client.publish(local=Predictor.of(trained, task=task))
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(trained, x)[0], task=task)
        counts, means = class_means(features, client.examples().y, task.network.head_shape[0])
        return {"means": means.to(features), "exist": (counts > 0).to(features)}

    def assembled(self, client: Client, shared: Tree) -> Tree:
        """The whole model of the received head and the client's body, which is the initial one until it trains."""
        task = task_of(client)
        own: Tree | None = client.state.get("personal")
        # the head has the names of the first architecture
        named = {name.rpartition(".")[2]: leaf for name, leaf in shared.items()}
        head = {name: named[name.rpartition(".")[2]] for name in task.network.head_names}
        model = {**(client.initial_model(task) if own is None else own), **head}
        return part(model, task.network.parameter_names + task.network.buffer_names)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["shared"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self.assembled(client, server["shared"]), task=task_of(client))}

    def update(self, trained: Any, received: Tree, task: Task) -> None:
        """None: clients send no layer."""
        return None
