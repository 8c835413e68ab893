"""FedRecon: clients keep nothing; they reconstruct their part of the network each time, then train the shared one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.settings import epochs_without_effect
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.params import Tree, zeros_like
from rayfl.tasks.base import Model, Predictor, Task

_ADAPTIVE: Mapping[str, type[FedAdagrad] | type[FedAdam] | type[FedYogi]] = {
    "adagrad": FedAdagrad,
    "adam": FedAdam,
    "yogi": FedYogi,
}


class FedRecon(PartialModel):
    """FedRecon (federated reconstruction): a part of the network is the client's own, and it never has to keep it.

    A client's samples are divided into a support set and a query set, drawn once. In a round it begins with the
    initial head P_0, the same everywhere, and the received body G, and trains one after the other, each with an
    optimizer of its own and with the other part frozen:

        P_k <- k_r epochs from P_0 on the head, at the received G, on the support set
        G_k <- k_u epochs from G on the body, at P_k, on the query set
        G <- G + eta_s sum_k q_k (G_k - G)

    P_k is then forgotten. With ``server_optimizer`` the server's step along the mean change is that of FedAvgM,
    FedAdagrad, FedAdam or FedYogi. Buffers (running statistics) are part of the body, and averaged: what the first
    pass records in them is dropped. A client with one sample has it in both sets.

    Server: body G, and the moments of its optimizer. Client: nothing. Down: G. Up: G_k and the number of samples in the
    query set. Evaluated: G with the head that the client reconstructs at G on all its training samples
    (``personalized``), of clients that never took part and of newcomers, too. There is no global model.

    References:
        Singhal, Sidahmed, Garrett, Wu, Rush, Prakash: Federated Reconstruction: Partially Local Federated Learning,
        NeurIPS 2021 (arXiv:2102.03448), Algorithm 1.
    """

    name: Literal["fedrecon"] = "fedrecon"
    citation: ClassVar[str] = "Singhal et al., NeurIPS 2021"
    server_keeps: ClassVar[str] = "G, the moments of its optimizer"
    newcomer: ClassVar[str] = "the shared part, and a part of its own that it reconstructs as all clients do"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean: samples of the query sets, / their sum over the cohort; uniform 1/|S|"
    )
    reconstruction_epochs: int | None = setting(
        None, "k_r", "epochs of the head's pass; null: train.local_epochs", ge=0, unless={"head_group": ("none",)}
    )
    reconstruction_lr: float | None = setting(
        None,
        "eta_r",
        "learning rate of the head's pass in round 0, which then changes as train.lr does; null: train.lr",
        gt=0,
        unless={"head_group": ("none",), "reconstruction_epochs": (0,)},
    )
    body_epochs: int | None = setting(None, "k_u", "epochs of the body's pass; null: train.local_epochs", ge=0)
    support_share: float | None = setting(
        0.5,
        "",
        "share of a client's training samples in the support set, the others are the query set; null: both are all",
        gt=0,
        lt=1,
    )
    server_lr: float = setting(1.0, "eta_s", "learning rate of the server", gt=0)
    server_optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = setting(
        "sgd", "", "what the server steps with, with its decays as in fedavgm, fedadagrad, fedadam, fedyogi", kept=True
    )
    server_momentum: float = setting(
        0.0, "beta", "momentum of the server's SGD", ge=0, lt=1, only={"server_optimizer": ("sgd",)}
    )
    adaptivity: float = setting(
        1e-3,
        "tau",
        "added to the root of the second moment; the larger, the less adaptive",
        gt=0,
        only={"server_optimizer": tuple(_ADAPTIVE)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.head_group == "all":
            raise ConfigError("algorithm.head_group is all, which leaves FedRecon no body to share: set last_layer")
        if context.train.persist_optimizer:
            raise ConfigError(
                "train.persist_optimizer would have clients keep their optimizers, and those of FedRecon keep nothing: "
                "set train.persist_optimizer=false"
            )
        augmentation = context.augmentation
        if self.support_share is not None and augmentation is not None and augmentation.views == 1:
            raise ConfigError(
                "augment changes a client's whole training data alone, not the support and query sets of FedRecon: "
                "drop augment, or set algorithm.support_share=null"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return epochs_without_effect(self, ("reconstruction_epochs", "body_epochs"), context.train)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        shared = shared_part(server)
        names = [name for name in task.network.parameter_names if name in shared]
        return {**server, "moments": self.server_rule.moments(zeros_like(part(shared, names)))}

    @property
    def server_rule(self) -> FedOpt:
        """The server's optimizer."""
        if self.server_optimizer == "sgd":
            return FedAvgM(server_lr=self.server_lr, server_momentum=self.server_momentum)
        return _ADAPTIVE[self.server_optimizer](server_lr=self.server_lr, adaptivity=self.adaptivity)

    def sent(self, server: Tree) -> Tree:
        return {"shared": shared_part(server)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared, moments = shared_part(server), server["moments"]
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server))
        start, end = (part(tree, moments["first"]) for tree in (shared, mean))
        stepped, moments = self.server_rule.stepped(start, end, moments)
        return {"shared": {**mean, **stepped}, "moments": moments}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Reconstructs the head on the support set, and trains the received body on the query set."""
        network = client.task.network
        support, query = self.divided(client)
        fitted = await self.reconstructed(client, self.assembled(client, shared), support)
        # without a first pass the second one is the round's first
        stream = "" if self.reconstruction_epochs == 0 or not self.head(network) else ".1"
        body = await self.train_part(
            client, fitted, self.body(network), self.body_epochs, stream=stream, examples=query
        )
        client.publish(local=Predictor.of({**fitted, **body}))
        counted = client.num_samples if query is None else len(query)
        return Weighted(body, 1 if self.aggregation == "uniform" else counted)

    async def reconstructed(
        self, client: Client, model: Model, samples: Examples | None = None, stream: str = ""
    ) -> Tree:
        """Returns the model with the head that is trained while the body stands still.

        Args:
            client: k.
            model: the body, and the head to begin with.
            samples: what to train on; None for all training samples.
            stream: suffix of the streams.
        """
        lr = self.reconstruction_lr
        lr = None if lr is None else lr * client.context.train.factor_in(client.round)
        names = self.head(client.task.network)
        head = await self.train_part(
            client, model, names, self.reconstruction_epochs, stream=stream, lr=lr, examples=samples
        )
        return {**model, **head}

    def divided(self, client: Client) -> tuple[Examples | None, Examples | None]:
        """Returns the client's support set and query set, the same in all rounds; None where that is all samples."""
        count = client.num_samples
        if self.support_share is None or count == 1:
            return None, None
        samples, order = client.examples(), client.context.streams.generator("support", client=client.id)
        rows = torch.from_numpy(order.permutation(count)).to(samples.y.device)
        first = min(max(round(self.support_share * count), 1), count - 1)
        support, query = (Examples(samples.x[chosen], samples.y[chosen]) for chosen in (rows[:first], rows[first:]))
        return support, query

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Nothing: a newcomer's head is reconstructed for its evaluation, as everybody's is."""
        return {}

    @property
    def joins_for(self) -> str:
        return "train.local_epochs" if self.reconstruction_epochs is None else "algorithm.reconstruction_epochs"

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = self.assembled(client, shared_part(server))
        return {"personalized": Predictor.of(await self.reconstructed(client, model, stream=".reconstruct"))}
