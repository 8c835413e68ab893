"""RoFL: clients learn from samples of small losses, whose labels the mean features of each class confirm or replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.accumulators import ACCUMULATOR, adding, check_unclipped
from algorithms.parts.corrected_labels import outputs_of
from algorithms.parts.masks import kept_counts
from algorithms.parts.prototypes import class_means, memberships
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.examples import Examples
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


def smallest(losses: Tensor, batch: Batch, share: float) -> Tensor:
    """1 for the floor(share b) samples with the smallest losses, at least one of them, else 0; shape (b,).

    Args:
        losses: by sample, shape (b,); no gradient flows.
        batch: whose padding is never among them.
        share: of the samples.
    """
    losses = losses.detach()
    if batch.mask is not None:
        losses = losses.masked_fill(batch.mask == 0, torch.inf)
    ranks = losses.argsort(stable=True).argsort(stable=True)
    count = kept_counts(share, torch.as_tensor(batch.size)).clamp(min=1)
    return (ranks < count).to(losses)


class RoFL(FineTuned):
    """RoFL (robust federated learning with noisy labels): small losses, and class centroids that all clients align.

    Server and clients exchange a model w and a centroid c_j in the space of features f(x) (which the last layer reads)
    for each class j. In round t a client steps on the (1 - r_t) b samples S of a mini-batch of b with the smallest
    cross-entropies, r_t = r min(1, t / T_k). A sample of label y is confident, m = 1, if c_y is the centroid that is
    the most similar to f(x) (by cosine), else m = 0. The step goes down

        1/|S| sum_S [CE(z, y') + lambda_t m / d ||f(x) - c_y||^2 + lambda_e H(softmax(z))]
        lambda_t = lambda min(1, (t + 1) / T_p)

    where d is the number of features, H is the entropy, y' = y for confident samples and in the first T_p rounds, and
    otherwise y' is the class that the received w says. Then the client's centroids follow the mean features h_j of the
    samples of S with label j,

        c_j <- c_j + s_j^2 (h_j - c_j),    s_j = cos(c_j, h_j)

    The server averages models, and centroids by how similar they are to its own,

        c_j <- sum_{k in S} s_kj c_kj / sum_{k in S} s_kj,    s_kj = max(0, cos(c_j, c_kj))

    A class without a centroid at the server begins, at a client, with the mean features of the client's samples under
    w, and at the server with the plain mean.

    Server: w, c_j. Client: nothing. Down: w, c_j. Up: w_k, n_k, c_kj. Evaluated: w (``global``), and with
    ``finetune_epochs`` w fine-tuned by each client on the plain cross-entropy with the given labels.

    References:
        Yang, Park, Byun, Kim: Robust Federated Learning with Noisy Labels, IEEE Intelligent Systems 2022 (arXiv
        2012.01700); formulas of public code that is not the authors'.
    """

    name: Literal["rofl"] = "rofl"
    citation: ClassVar[str] = "Yang et al., IEEE IS 2022"
    no_privacy: ClassVar[str] = "its clients send the mean features of each class, which the server compares one by one"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "centroids are mean features by class",
        "distribution": "what it is unsure of is an entropy of probabilities",
    }
    server_keeps: ClassVar[str] = "w, c_j"

    forget_rate: float = setting(
        0.2, "r", "last share of a mini-batch, of the largest losses, that is not learned", ge=0, lt=1
    )
    forget_rounds: int = setting(
        10, "T_k", "rounds in which r_t rises to r; 0: none", ge=0, unless={"forget_rate": (0,)}
    )
    pseudo_from: int = setting(
        10, "T_p", "round (0-indexed) from which on labels of samples that are not confident are replaced", ge=0
    )
    centroid_weight: float = setting(1.0, "lambda", "last weight of the distance from the centroids", ge=0)
    entropy_weight: float = setting(0.8, "lambda_e", "weight of the entropy", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_unclipped("RoFL", "", context)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.pseudo_from < context.rounds:
            return ()
        return (
            f"no label is replaced: algorithm.pseudo_from is {self.pseudo_from}, but the run has {context.rounds} "
            "rounds",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        like, shape = next(iter(server["model"].values())), task.network.head_shape
        return {**server, "centroids": like.new_zeros(shape), "exist": like.new_zeros(shape[0])}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.remainder(server["model"], cohort, clients)
        model = clients.mean(self.local_update, cohort, server, also=rest)
        replies = clients.map(self.report, cohort, {}).values()
        theirs, exist = (torch.stack([reply[key] for reply in replies]) for key in ("centroids", "exist"))
        return {"model": model, **aligned(server["centroids"], server["exist"], theirs, exist)}

    async def local_update(self, client: Client, model: Tree, centroids: Tensor, exist: Tensor) -> Weighted:  # type: ignore[override]
        """Trains the received model; keeps its centroids until it sends them.

        Args:
            client: who trains.
            model: w.
            centroids: c_j, shape (C, d).
            exist: 1 for those that there are, else 0, shape (C,).
        """
        samples, like = client.examples(), centroids
        own, replaced = exist, samples.y
        if not bool(exist.all()):
            features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
            counts, means = class_means(features, samples.y, len(exist))
            centroids = torch.where(exist[:, None] > 0, centroids, means.to(like))
            own = torch.maximum(exist, (counts > 0).to(like))
        if client.round >= self.pseudo_from:
            replaced = (await outputs_of(client, model)).argmax(-1)
        trained = await client.train(
            {"model": model, "centroids": centroids},
            self.guided,
            frozen={"exist": own, **self.course_of_training(client.round)},
            groups={"centroids": ACCUMULATOR},
            examples=Examples(samples.x, torch.stack([samples.y, replaced], 1)),
            views=client.context.augmentation,
        )
        client.publish(local=Predictor.of(trained["model"]))
        client.state["centroids"] = {"centroids": trained["centroids"], "exist": own}
        return self.weighted(client, trained["model"])

    def course_of_training(self, round: int) -> dict[str, float]:
        """1 - r_t (``kept``) and lambda_t (``pull``).

        Args:
            round: t, 0-indexed.
        """
        risen = min(1.0, round / self.forget_rounds) if self.forget_rounds else 1.0
        pull = min(1.0, (round + 1) / self.pseudo_from) if self.pseudo_from else 1.0
        return {"kept": 1 - self.forget_rate * risen, "pull": self.centroid_weight * pull}

    async def report(self, client: Client) -> Tree:
        """Returns c_kj, ``centroids`` of shape (C, d), and ``exist``, 1 for each that there is."""
        found: Tree = client.state.pop("centroids")
        return found

    @property
    def guided(self) -> Sum:
        """What a client trains on."""
        return function(self._guided)

    def _guided(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        centroids = trained["centroids"].detach()
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        given, said = batch.y[:, 0], batch.y[:, 1]
        chosen = smallest(cross_entropy(logits, given, reduction="none"), batch, frozen["kept"])
        seen = features.detach()
        similar = cosine_similarity(seen[:, None], centroids[None], dim=-1)
        confident = similar.masked_fill(frozen["exist"] == 0, -torch.inf).argmax(-1) == given
        losses = cross_entropy(logits, torch.where(confident, given, said), reduction="none")
        apart = (features - centroids[given]).square().mean(-1)
        surprise = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        losses = losses + frozen["pull"] * confident * apart + self.entropy_weight * surprise
        value: Tensor = (chosen * losses).sum() / chosen.sum()
        members = memberships(replace(batch, y=given), frozen["exist"]) * chosen[:, None]
        means = members.T @ seen / members.sum(0).clamp(min=1)[:, None]
        # a class of which there is no sample has means of 0, which are similar to nothing
        steps = cosine_similarity(centroids, means, dim=-1).square()[:, None] * (means - centroids)
        return value + adding(trained["centroids"], steps)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}


def aligned(centroids: Tensor, exist: Tensor, theirs: Tensor, known: Tensor) -> Tree:
    """The server's centroids after a round, ``centroids`` and ``exist``.

    Args:
        centroids: c_j, shape (C, d).
        exist: 1 for those that there are, else 0, shape (C,).
        theirs: c_kj, shape (|S|, C, d).
        known: 1 for those that there are, else 0, shape (|S|, C).
    """
    similar = cosine_similarity(theirs.double(), centroids.double()[None], dim=-1).clamp(min=0)
    weights = known.double() * torch.where(exist > 0, similar, 1.0)
    total = weights.sum(0)
    means = (weights[..., None] * theirs.double()).sum(0) / torch.where(total > 0, total, 1.0)[:, None]
    return {
        "centroids": torch.where(total[:, None] > 0, means.to(centroids), centroids),
        "exist": torch.where(total > 0, torch.ones_like(exist), exist),
    }
