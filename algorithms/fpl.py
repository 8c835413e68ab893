"""FPL: features are drawn to class prototypes, several for each class, as clients' data may be of several domains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.first_neighbours import cluster_means, finch
from algorithms.parts.prototypes import class_means
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FPL(Averaging):
    """FPL: federated averaging whose clients draw features to class prototypes of clusters of clients.

    With f(x) in R^d the input of the last linear layer, client k sends its mean features mu_ky by class, of its trained
    model w_k. The server clusters those of class y by their first neighbours (FINCH, by cosines), and sends the mean of
    each cluster, the cluster prototypes P_y. The unbiased prototype u_y is the mean of P_y, in which a domain of many
    clients counts as much as one of few. Clients minimise, with a mean over the mini-batch,

        CE + lambda_c CPCL + lambda_u UPCR
        CPCL = -log[ sum_{p in P_y} e^(cos(f(x), p) / tau) / sum_c sum_{p in P_c} e^(cos(f(x), p) / tau) ]
        UPCR = (f(x) - u_y)^2, the mean over d features

    where c goes over all classes that have prototypes. Samples of classes without prototype take no part in CPCL and
    UPCR; in the first round there are none.

    Server: model w, and P_y. Client: nothing. Down: w, and P_y with their classes. Up: w_k (with n_k), and mu_ky with a
    mark for each class that there is. Evaluated: w (``global``). Where both weights are 0 it is federated averaging,
    and no prototype travels. Newcomers have w.

    References:
        Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023.
    """

    name: Literal["fpl"] = "fpl"
    citation: ClassVar[str] = "Huang et al., CVPR 2023"
    no_privacy: ClassVar[str] = "its clients send class means of features beside their models"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "prototypes are mean features by class"}
    server_keeps: ClassVar[str] = "w, P_y"

    contrast_weight: float = setting(1.0, "lambda_c", "weight of CPCL, the contrast with cluster prototypes", ge=0)
    regularization_weight: float = setting(
        1.0, "lambda_u", "weight of UPCR, the squared distance to unbiased prototypes", ge=0
    )
    temperature: float = setting(0.02, "tau", "temperature of the contrast", gt=0, unless={"contrast_weight": (0,)})
    clusters: Literal["last", "first"] = setting(
        "last",
        "",
        "which of FINCH's partitions: the last of more than one cluster (authors' code), or the first, whose clusters "
        "are more and smaller",
        unless={"contrast_weight and regularization_weight": ((0, 0),)},
    )
    forget_absent: bool = setting(
        False,
        "",
        "drop the prototypes of classes that nobody in the cohort has (authors' code)",
        unless={"contrast_weight and regularization_weight": ((0, 0),)},
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        clusters = next(iter(model.values())).new_zeros((0, task.network.head_shape[1]))
        return {"model": model, "prototypes": {"clusters": clusters, "labels": torch.zeros(0, dtype=torch.int64)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.contrast_weight and not self.regularization_weight:
            return super().round(server, cohort, clients)
        rest = self.remainder(server["model"], cohort, clients)
        model = clients.mean(self.guided_update, cohort, broadcast=server, also=rest)
        replies = clients.map(self.report, cohort, broadcast={}).values()
        means, exist = (torch.stack([reply[name] for reply in replies]) for name in ("means", "exist"))
        return {"model": model, "prototypes": self.renewed(server["prototypes"], means, exist > 0)}

    def renewed(self, old: Tree, means: Tensor, exist: Tensor) -> Tree:
        """Cluster prototypes after a round: ``clusters`` of shape (m, d), and ``labels``, their classes, ascending.

        Args:
            old: those before.
            means: mu_ky, shape (S, C, d).
            exist: which of them there are, shape (S, C).
        """
        found: list[Tensor] = []
        labels: list[int] = []
        for label, present in enumerate(exist.T):
            if present.any():
                points = means[present, label].double().numpy()
                centres = torch.from_numpy(cluster_means(points, finch(points, self.clusters == "last")))
            else:
                centres = old["clusters"][old["labels"] == label][: 0 if self.forget_absent else None]
            found.append(centres.to(means))
            labels += [label] * len(centres)
        return {"clusters": torch.cat(found), "labels": torch.tensor(labels, dtype=torch.int64)}

    async def guided_update(self, client: Client, model: Tree, prototypes: Tree) -> Weighted:
        """Trains the received model towards the prototypes; keeps its mean features by class until it sends them."""
        classes = client.task.network.head_shape[0]
        if len(prototypes["labels"]):
            counts, means = class_means(prototypes["clusters"], prototypes["labels"], classes)
            frozen = {**prototypes, "means": means.to(prototypes["clusters"]), "exist": counts > 0}
            trained = await client.train(model, self.guided_objective, frozen=frozen)
        else:
            trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(trained, x)[0])
        counts, means = class_means(features, client.examples().y, classes)
        client.state["prototypes"] = {"means": means.to(features), "exist": (counts > 0).to(features)}
        return self.weighted(client, trained)

    async def report(self, client: Client) -> Tree:
        """Returns the mean features by class, ``means`` of shape (C, d), and ``exist``, 1 for each that there is."""
        found: Tree = client.state.pop("prototypes")
        return found

    @property
    def guided_objective(self) -> Sum:
        """The cross-entropy, CPCL and UPCR, from one forward pass."""
        return function(self._guided)

    def _guided(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        value: Tensor = task.loss_of(logits, batch)
        known = frozen["exist"][batch.y]
        if self.contrast_weight:
            contrast = contrasts(features, batch.y, frozen["clusters"], frozen["labels"], known, self.temperature)
            value = value + self.contrast_weight * batch.mean(contrast)
        if self.regularization_weight:
            apart = known.to(features) * (features - frozen["means"][batch.y]).square().mean(-1)
            value = value + self.regularization_weight * batch.mean(apart)
        return value

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}


def contrasts(
    features: Tensor, y: Tensor, clusters: Tensor, labels: Tensor, known: Tensor, temperature: float
) -> Tensor:
    """CPCL of each sample, shape (b,); 0 where the sample's class has no prototype.

    Args:
        features: f(x), shape (b, d).
        y: the samples' classes, shape (b,).
        clusters: the prototypes, shape (m, d).
        labels: their classes, shape (m,).
        known: whether the sample's class has a prototype, shape (b,).
        temperature: tau.
    """
    cosines = F.normalize(features, dim=-1) @ F.normalize(clusters, dim=-1).T / temperature
    others = (labels != y[:, None]) & known[:, None]
    return cosines.logsumexp(-1) - cosines.masked_fill(others, -math.inf).logsumexp(-1)
