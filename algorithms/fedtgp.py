"""FedTGP: models of the clients' own, aligned with prototypes that the server trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.aligned_models import AlignedModels
from algorithms.parts.architectures import task_of
from algorithms.parts.generators import linear
from algorithms.parts.prototypes import class_means, memberships
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedTGP(AlignedModels):
    """FedTGP: every client trains a model of its own, towards class prototypes that the server learns from theirs.

    With f(x) in R^d the input of the last linear layer, client k trains its own model v_k on

        CE + lambda mean_y ||f_y - c_y||

    with f_y the mean of f(x) over a mini-batch's samples of class y, and the mean over its classes. It sends its mean
    features mu_ky by class, from all its samples at the trained model in evaluation mode. The prototypes are
    c_y = F(u_y), of trainable vectors u_y and a network F of two linear layers with ReLU between them. From all pairs
    (k, y) of the cohort the server goes down S epochs of

        mean of -log[ e^-(||mu_ky - c_y|| + delta) / (e^-(||mu_ky - c_y|| + delta) + sum_{j != y} e^-||mu_ky - c_j||) ]
        delta = min(max_{i != j} ||m_i - m_j||, tau),    m_y = mean_k mu_ky

    over all u_y and F, by plain SGD. Every class mean counts the same, whatever its samples.

    Server: u_y and F. Client: v_k; never sent. Down: c_y. Up: mu_ky, and a mark for each class that there is.
    Evaluated: v_k with the class of the nearest prototype, argmin_y ||f(x) - c_y||^2, and by its own last layer; one
    of them is ``personalized`` (``inference``), the other has its own name (``head``, ``prototypes``). A client never
    sampled has its initial model. There is no global model.

    Clients may have different architectures (``model.candidates``) of one d: each client's is drawn.

    References:
        Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning
        for Data and Model Heterogeneity in Federated Learning, AAAI 2024, Algorithm 1 and eqs. 2, 5, 9-11.
    """

    name: Literal["fedtgp"] = "fedtgp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Zhang et al., AAAI 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "prototypes are learned from mean features by class"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "u_y, F"
    newcomer: ClassVar[str] = "the prototypes, and a model after a local update"
    mixes_architectures: ClassVar[bool] = True

    alignment_weight: float = setting(0.1, "lambda", "weight of the distance of features to prototypes", ge=0)
    distance: Literal["class_means", "samples"] = setting(
        "class_means",
        "phi",
        "that distance: Euclidean, of class means, as a mean over a mini-batch's classes (eq. 11), or squared, of each "
        "sample's features, as a mean over samples and features (authors' code, whose lambda is 10)",
        unless={"alignment_weight": (0,)},
    )
    margin: Literal["farthest", "nearest", "fixed"] = setting(
        "farthest",
        "delta(t)",
        "margin before tau limits it: the largest distance of two m_y (eq. 9), the largest of a m_y to its nearest "
        "other (authors' code), or tau (eq. 7)",
        unless={"margin_limit": (0,), "server_epochs": (0,)},
    )
    margin_limit: float = setting(
        100.0, "tau", "largest margin; 0: no margin (eq. 6)", ge=0, unless={"server_epochs": (0,)}
    )
    server_epochs: int = setting(100, "S", "passes of the server over the class means in a round", ge=0)
    server_lr: float | None = setting(
        None,
        "eta",
        "learning rate of the server; null: the clients' of the round",
        ge=0,
        unless={"server_epochs": (0,)},
    )
    processing: Literal["network", "none"] = setting(
        "network", "F", "what makes prototypes of the trainable vectors: a network, or nothing (c_y = u_y)", kept=True
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        like = next(iter(task.network.initialize(context.streams.integer("init.global")).values()))
        classes, width = task.network.head_shape
        generator = context.streams.generator("init.generator")
        trained: Tree = {"vectors": torch.from_numpy(generator.standard_normal((classes, width))).to(like)}
        if self.processing == "network":
            layers = (linear(width, width, like, generator) for _ in range(2))
            trained["network"] = dict(zip(("first", "second"), layers, strict=True))
        return {"trained": trained, "prototypes": made(trained)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        replies = clients.map(self.local_update, cohort, broadcast={"prototypes": server["prototypes"]})
        means = torch.stack([reply["means"] for reply in replies.values()])
        exist = torch.stack([reply["exist"] for reply in replies.values()]) > 0
        if not self.server_epochs:
            return {}
        delta = self.delta(means, exist)
        labels = exist.nonzero()[:, 1]
        given = {"trained": server["trained"], "means": means[exist], "labels": labels, "delta": delta}
        trained = clients.on_server(self.fit, given)["trained"]
        return {"trained": trained, "prototypes": made(trained)}

    def delta(self, means: Tensor, exist: Tensor) -> Tensor:
        """delta, a scalar; 0 where the cohort has one class.

        Args:
            means: mu_ky, shape (S, C, d).
            exist: which of them there are, shape (S, C).
        """
        limit = means.new_tensor(self.margin_limit)
        if self.margin == "fixed":
            return limit
        counts = exist.sum(0)
        sums = torch.where(exist[..., None], means, 0).sum(0)
        centers = (sums / counts.clamp(min=1)[:, None])[counts > 0]
        if len(centers) < 2:
            return torch.zeros_like(limit)
        apart = distances(centers, centers)
        if self.margin == "nearest":
            apart = apart.fill_diagonal_(torch.inf).min(1).values
        return apart.max().minimum(limit)

    async def fit(self, server: Server, trained: Tree, means: Tensor, labels: Tensor, delta: Tensor) -> Tree:
        """The vectors and the network after the server's epochs.

        Args:
            server: the server.
            trained: u_y and F.
            means: mu_ky of the cohort, shape (m, d).
            labels: their classes, shape (m,).
            delta: the margin.
        """
        train = server.context.train
        found = await server.train(
            trained,
            self.contrast,
            frozen={"delta": delta},
            examples=Examples(means, labels),
            epochs=self.server_epochs,
            settings=TrainConfig(
                batch_size=train.batch_size, lr=server.lr if self.server_lr is None else self.server_lr
            ),
        )
        return {"trained": found}

    def contrast(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The server's loss of a mini-batch of class means: the cross-entropy of negative distances with a margin."""
        prototypes = made(trained)
        own = F.one_hot(batch.y, len(prototypes)).to(prototypes)
        logits = -distances(batch.x, prototypes) - frozen["delta"] * own
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def aligned_loss(self, features: Tensor, logits: Tensor, batch: Batch, task: Task, prototypes: Any) -> Tensor:
        if self.distance == "samples":
            return super().aligned_loss(features, logits, batch, task, prototypes)
        members = memberships(batch, prototypes["exist"])
        counts = members.sum(0)
        means = members.T @ features / counts.clamp(min=1)[:, None]
        squares = (means - prototypes["means"]).square().sum(-1)
        apart = (counts > 0) & (squares > 0)
        # the root has no slope at 0
        lengths = torch.where(apart, torch.where(apart, squares, 1).sqrt(), 0)
        return task.loss_of(logits, batch) + self.alignment_weight * lengths.sum() / (counts > 0).sum().clamp(min=1)

    async def local_update(self, client: Client, prototypes: Tensor) -> Tree:
        """Trains the client's own model; returns its mean features by class, and marks."""
        task, known = task_of(client), marked(prototypes)
        trained = await client.train(
            {"model": self.own(client)},
            self.objective if self.alignment_weight else self.plain_objective,
            frozen={"prototypes": known},
            task=task,
        )
        model = client.state["local"] = trained["model"]
        client.publish(**self.rows(client, model, known))
        features = await client.outputs(lambda x, t: t.network.head_inputs_and_logits(model, x)[0], task=task)
        counts, means = class_means(features, client.examples().y, len(prototypes))
        return {"means": means.to(features), "exist": (counts > 0).to(features)}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["prototypes"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return self.rows(client, self.own(client), marked(server["prototypes"]))

    def sent(self, server: Tree) -> Tree:
        return {"prototypes": server["prototypes"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}


def made(trained: Mapping[str, Any]) -> Tensor:
    """c_y, shape (C, d): F of the trainable vectors, or these."""
    vectors: Tensor = trained["vectors"]
    if "network" not in trained:
        return vectors
    first, second = trained["network"]["first"], trained["network"]["second"]
    return F.linear(F.linear(vectors, first["weight"], first["bias"]).relu(), second["weight"], second["bias"])


def marked(prototypes: Tensor) -> Tree:
    """The prototypes as a tree that says that all exist."""
    return {"means": prototypes, "exist": torch.ones_like(prototypes[:, 0])}


def distances(left: Tensor, right: Tensor) -> Tensor:
    """||a - b|| of each pair of rows (n, d) and (m, d); shape (n, m), of slope 0 where both are equal."""
    # not by a matrix product, in which the distances of near features cancel
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
