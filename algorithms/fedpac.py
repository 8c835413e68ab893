"""FedPAC: a shared body whose features are aligned by class, and heads combined for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.combination import combination_weights, pruned
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.prototypes import class_means, renewed
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, weighted_sums
from rayfl.tasks.base import Batch, Predictor, Task, Trait

LEAST_WEIGHT = 1e-3
"""Smaller weights of a combination are set to zero."""


def estimate(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns what the combination of heads needs of a client: h of shape (C, f), and the scalar V >= 0; float64.

    With frequencies pi_y = n_y / n, h_y = pi_y mu_y and

        V = 1/n sum_y (pi_y mean_y ||f||^2 - pi_y^2 ||mu_y||^2)
          = 1/n (mean ||f - mu||^2 + sum_y pi_y (1 - pi_y) ||mu_y||^2)

    computed in the second form, in which nothing cancels.
    """
    counts, means = class_means(features, labels, classes)
    frequencies = counts / len(labels)
    within = (features.double() - means[labels]).square().sum(-1).mean()
    between = (frequencies * (1 - frequencies) * means.square().sum(-1)).sum()
    return frequencies[:, None] * means, (within + between) / len(labels)


class FedPAC(PartialModel):
    """FedPAC: shared body, features aligned with global class means (prototypes), and heads combined per client.

    A client joins the received body G with its head P_k and, with features f(x) the input of the head,

        estimates h_k and V_k, and its class means mu_y, from all its samples at this model
        P_k <- tau_h epochs on the head at G:        CE
        G_k <- E epochs on the body at the new P_k:  CE + lambda mean (f(x) - c_y)^2

    where the mean is over batch and features, and c_y is the prototype of the label's class, mu_y where there is none
    yet; before there is any, lambda is 0. The second pass has an optimizer and batches of its own. The server takes
    the mean of the G_k and, for c_y, the mean of all features of class y in the cohort at the trained models; a class
    that nobody had keeps its prototype. Every client i of the cohort gets the head sum_j a_j P_j, where a minimises
    the estimated variance and bias over the simplex, sum_j a_j^2 V_j + ||h_i - sum_j a_j h_j||^2; weights below 0.001
    are dropped.

    Server: body G, prototypes, mean head. Client: head P_k, at first that of the common initial model. Down: G,
    prototypes with a mark of those that exist, and the combined head. Up: G_k, P_k, class means and counts, h_k, V_k
    and n_k. Evaluated: the latest G with the client's P_k (``personalized``) and with the mean of the cohort's heads
    as trained (``global``); a client never sampled has the initial head.

    The official code forms the matrix of the program and deletes its eigenvalues below 0.01 where round-off made one
    negative, which changes the program; here it is solved exactly (``eigenvalue_clip`` deletes them always).

    References:
        Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
        ICLR 2023, Algorithm 1 and eqs. 4-8.
    """

    name: Literal["fedpac"] = "fedpac"
    citation: ClassVar[str] = "Xu et al., ICLR 2023"
    no_privacy: ClassVar[str] = "its clients send mean features by class, too, and get mixtures of heads"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features are pulled to mean features by class"}
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G, c_y, mean of P_k"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    alignment_weight: float = setting(1.0, "lambda", "weight of the distance of features to prototypes", ge=0)
    head_epochs: int = setting(1, "tau_h", "epochs of the head's pass", ge=0)
    head_lr: float | None = setting(
        0.1, "", "learning rate of the head's pass; null: that of the round", ge=0, unless={"head_epochs": (0,)}
    )
    combine_heads: bool = setting(True, "", "combine the heads of the cohort for each client; false: keep the own one")
    eigenvalue_clip: float | None = setting(
        None,
        "",
        "delete eigenvalues of the program's matrix below this (official code: 0.01); null: solve exactly",
        ge=0,
        only={"combine_heads": (True,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedPAC", task.network)
        if not set(self.body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "FedPAC aligns features, but the model trains no layer before the last: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        weight = model[task.network.head_weight]
        prototypes = {"means": torch.zeros_like(weight), "exist": weight.new_zeros(len(weight))}
        server = {"shared": part(model, self.body(task.network)), "prototypes": prototypes}
        return server | ({"head": part(model, task.network.head_names)} if self.combine_heads else {})

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared, prototypes = shared_part(server), server["prototypes"]
        nothing = {"sums": torch.zeros_like(prototypes["means"]), "counts": torch.zeros_like(prototypes["exist"])}
        rest = self.remainder({"shared": shared, **nothing}, cohort, clients)
        received = {"shared": shared, "prototypes": prototypes}
        mean = clients.mean(self.aligned_update, cohort, broadcast=received, also=rest)
        changed = {"shared": mean["shared"], "prototypes": renewed(prototypes, mean["sums"], mean["counts"])}
        if not self.combine_heads:
            return changed
        reports = clients.map(self.report, cohort, broadcast={})
        clients.map(self.adopt, cohort, broadcast={}, payloads=self.combined(reports))
        heads = {client: report["head"] for client, report in reports.items()}
        return changed | {"head": mean_over_cohort(self, heads, server["head"], clients)}

    async def aligned_update(self, client: Client, shared: Tree, prototypes: Tree) -> Weighted:
        """Trains head, then body; keeps the head, and what :meth:`report` sends of the model before training."""
        network, model = client.task.network, self.assembled(client, shared)
        labels, classes = client.examples().y, len(model[network.head_weight])
        features = await self.features(client, model)
        head = await self.train_part(client, model, network.head_names, self.head_epochs, lr=self.head_lr)
        fitted = {**model, **head}
        means = class_means(features, labels, classes)[1].to(features)
        align = self.alignment_weight > 0 and bool(prototypes["exist"].any())
        body = await self.train_part(
            client,
            fitted,
            self.body(network),
            stream=".1" if self.head_epochs else "",
            objective=self.aligned_objective if align else None,
            reads={"targets": torch.where(prototypes["exist"][:, None] > 0, prototypes["means"], means)},
        )
        trained = {**fitted, **body}
        client.publish(local=Predictor.of(trained))
        client.state["personal"] = head
        if self.combine_heads:
            expected, variance = estimate(features, labels, classes)
            client.state["estimate"] = {"mean": expected.to(features), "variance": variance.to(features)}
        counts, means = class_means(await self.features(client, trained), labels, classes)
        # whatever the weight of the body, every sample weighs the same in the prototypes
        share = 1 if self.aggregation == "uniform" else 1 / client.num_samples
        sums = {"sums": (counts[:, None] * means * share).to(features), "counts": (counts * share).to(features)}
        return self.weighted(client, {"shared": body, **sums})

    async def features(self, client: Client, model: Tree) -> Tensor:
        """Returns what the head reads for each of the client's training samples, in evaluation mode; shape (n, f)."""
        return await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])

    def aligned_objective(self, moving: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Cross-entropy, and the mean squared distance of the features to the targets of their classes."""
        inputs, logits = task.head_inputs_and_logits({**frozen["model"], **moving}, batch)
        distances = (inputs - frozen["targets"][batch.y]).square().mean(-1)
        return task.loss_of(logits, batch) + self.alignment_weight * batch.mean(distances)

    async def report(self, client: Client) -> Tree:
        """Head, h (``mean``) and V (``variance``)."""
        return {"head": client.state["personal"], **client.state.pop("estimate")}

    def combined(self, reports: dict[int, Tree]) -> dict[int, Tree]:
        """The new heads by client, as arguments of :meth:`adopt`."""
        means = torch.stack([report["mean"] for report in reports.values()]).double().cpu().numpy()
        variances = torch.stack([report["variance"] for report in reports.values()]).double().cpu().numpy()
        weights = pruned(combination_weights(means, variances, self.eigenvalue_clip), LEAST_WEIGHT)
        heads = [report["head"] for report in reports.values()]
        combined = weighted_sums(heads, torch.as_tensor(weights))
        return {client: {"head": head} for client, head in zip(reports, combined, strict=True)}

    async def adopt(self, client: Client, head: Tree) -> Tree:
        """Takes the combined head for its own."""
        client.state["personal"] = head
        return {}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of({**server["head"], **shared_part(server)})} if self.combine_heads else {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return await super().predictors(client, server) | self.global_predictors(server, client.task)
