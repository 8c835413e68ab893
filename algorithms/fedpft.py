"""FedPFT: clients send Gaussian mixtures of their features by class, and the server trains the last layer on draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, check_head, setting
from algorithms.parts.feature_mixtures import Covariance, drawn, fitted
from algorithms.parts.partial import part
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task, Trait


class FedPFT(Algorithm):
    """FedPFT (parametric feature transfer): one round, in which clients send mixtures and the server trains the head.

    With z in R^d the input of the last linear layer in evaluation mode, client k fits to the z of each of its classes c
    a mixture of K Gaussians, by expectation and maximisation:

        p_kc(z) = sum_j pi_kcj N(z; mu_kcj, Sigma_kcj)

    and sends pi, mu, Sigma and the number N_kc of its samples. Sigma is a multiple of 1 (``spherical``), diagonal
    (``diag``) or any covariance (``full``). The server draws N_kc features from each p_kc, and takes epochs of AdamW
    on their cross-entropy over the last layer W alone. The body below it, which is meant to be pretrained, never moves.

    Server: model w, of which it trains W. Client: nothing. Down: w. Up: pi, mu, Sigma and N_kc. Evaluated: w
    (``global``).

    References:
        Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang: Parametric Feature Transfer: One-shot Federated Learning
        with Foundation Models, arXiv:2402.01862, 2024.
    """

    name: Literal["fedpft"] = "fedpft"
    citation: ClassVar[str] = "Beitollahi et al., arXiv 2024"
    no_privacy: ClassVar[str] = "its clients send mixtures of features, which are no model"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features have a mixture for each class"}
    newcomer: ClassVar[str] = "w"

    components: int = setting(1, "K", "Gaussians of a class; of N samples at most N - 1, and one at least", ge=1)
    covariance: Covariance = setting("spherical", "Sigma", "one variance, one for each feature, or all entries")
    least_samples: int = setting(
        2, "", "samples from which on a client's class has a mixture; fewer are left out", ge=1
    )
    precision: Literal["float16", "float32"] = setting("float16", "", "type of the numbers that clients send")
    tolerance: float = setting(1e-12, "", "gain in mean log-likelihood below which a fit ends", gt=0)
    iterations: int = setting(1000, "", "after which a fit ends in any case", ge=1)
    server_epochs: int = setting(50, "", "passes of the server over the drawn features", ge=1)
    server_lr: float = setting(1e-4, "eta", "learning rate of the server's AdamW", ge=0)
    server_weight_decay: float = setting(0.01, "", "weight decay of the server's AdamW", ge=0)
    server_batch_size: int | None = setting(32, "", "drawn features in a mini-batch of the server; null: all", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        network = task.network
        check_head("FedPFT", network, bias=True)
        if not network.body_names and not network.fixed_parameters:
            raise ConfigError(
                "FedPFT fits mixtures to features, but this model has no layer before the last, so that its features "
                "are the samples themselves: choose a deeper model"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        still = "clients train nothing: epochs, mini-batches and learning rates of the section train have no effect"
        if context.rounds == 1:
            return (still,)
        more = f"train.rounds is {context.rounds}: every round goes on with the last layer, on features of its cohort"
        return (still, f"{more}; the paper has one round, of all clients")

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mixtures = clients.map(self.describe, cohort, {"model": server["model"]})
        head = part(server["model"], clients.task.network.head_names)
        given: Tree = {"head": head, "mixtures": {str(client): one for client, one in mixtures.items()}}
        return {"model": {**server["model"], **clients.on_server(self.learn, given)}}

    async def describe(self, client: Client, model: Tree) -> Tree:
        """The mixtures of the client's training samples."""
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        return fitted(
            features,
            client.examples().y,
            components=self.components,
            covariance=self.covariance,
            least=self.least_samples,
            tolerance=self.tolerance,
            iterations=self.iterations,
            seed=client.context.streams.integer("mixtures", client.round, client.id) % 2**32,
            dtype=getattr(torch, self.precision),
        )

    async def learn(self, server: Server, head: Tree, mixtures: Tree) -> Tree:
        """The last layer after the server's epochs on drawn features.

        Args:
            server: the server.
            head: W, by the names in the model.
            mixtures: by client.
        """
        generator = server.context.streams.generator("virtual", server.context.round)
        pairs = [drawn(mixtures[client], generator) for client in sorted(mixtures, key=int)]
        features, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if not len(labels):
            return head
        weight = head[server.task.network.head_weight]
        return await server.train(
            head,
            self.head_loss,
            examples=Examples(features.to(weight), labels.to(weight.device)),
            epochs=self.server_epochs,
            settings=TrainConfig(
                optimizer="adamw",
                lr=self.server_lr,
                weight_decay=self.server_weight_decay,
                batch_size=self.server_batch_size,
            ),
        )

    def head_loss(self, head: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the last layer on a mini-batch of its inputs."""
        weight = task.network.head_weight
        return task.loss_of(F.linear(batch.x, head[weight], head.get(weight.removesuffix("weight") + "bias")), batch)
