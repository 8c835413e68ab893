"""Federated distillation: clients with models of their own teach each other by their mean outputs on each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.architectures import task_of
from algorithms.parts.prototypes import class_means
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class Targets:
    """Mean outputs by class, over all clients that have the class, or all but one of them.

    Args:
        tables: ``means`` (C, C) and ``exist`` (C,) by client.
    """

    def __init__(self, tables: Mapping[str, Tree]) -> None:
        self._places = {client: place for place, client in enumerate(sorted(tables))}
        self._exist = torch.stack([tables[client]["exist"] for client in self._places])
        shares = self._exist[..., None] * torch.stack([tables[client]["means"] for client in self._places])
        none = torch.zeros_like(shares[:1])
        # What is taken out of a sum leaves its rounding behind, so there are sums of all before, and of all after.
        self._before = torch.cat([none, shares.cumsum(0)])
        self._after = torch.cat([shares.flip(0).cumsum(0).flip(0), none])

    def without(self, client: str | None) -> Tree:
        """``means`` (C, C), and ``exist`` (C,), a mark of the classes that have one.

        Args:
            client: whose own table does not count.
        """
        sums, owners = self._after[0], self._exist.sum(0)
        if client in self._places:
            place = self._places[client]
            sums, owners = self._before[place] + self._after[place + 1], owners - self._exist[place]
        return {"means": sums / owners.clamp(min=1)[:, None], "exist": (owners > 0).to(owners)}


class FedDistill(Algorithm):
    """FD (federated distillation; FedDistill): clients share their mean outputs by class, and no model.

    A client minimises over its own model v_k

        CE(z, y) + lambda D(T_k[y], p)

    for samples whose class y has a target T_k[y], with p = softmax(z) and D the cross-entropy -sum_c T_k[y]_c ln p_c.
    Afterwards it sends F_k[y], its mean output over all its samples of class y in evaluation mode, for each class it
    has. T_k[y] is the mean of F_j[y] over the other clients of the last cohort that have the class.

    Clients may have different architectures (``model.candidates``), each a draw of the client's own.

    Server: F_k of the last cohort. Client: v_k, at first the initial model of its architecture; never sent. Down: T_k,
    and a mark for each class that there is. Up: F_k and marks. Evaluated: v_k (``personalized``); a client never
    sampled has the initial model. There is no global model.

    In public code outputs may be logits, of which the target's softmax is taken (``output``), D the Kullback-Leibler
    divergence, the cross-entropy with logits in the place of probabilities, or the mean over the classes of the squared
    differences of logits (``divergence``), and T the mean over all clients, the own one too (``leave_one_out``).

    References:
        Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning: Federated Distillation
        and Augmentation under Non-IID Private Data, arXiv:1811.11479, 2018, Algorithm 1.
    """

    name: Literal["feddistill"] = "feddistill"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Jeong et al., arXiv 2018"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "clients exchange mean outputs by class"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "F_k"
    newcomer: ClassVar[str] = "a model that it trains alone, with the mean outputs by class"
    mixes_architectures: ClassVar[bool] = True

    distillation_weight: float = setting(1.0, "lambda", "weight of the distillation; 0 is local training", ge=0)
    output: Literal["probabilities", "logits"] = setting(
        "probabilities", "F", "whose mean clients send: softmax(z), or z (FedGen's and PFLlib's code)"
    )
    divergence: Literal["cross_entropy", "kl", "raw_logits", "squared_error"] = setting(
        "cross_entropy",
        "D",
        "of p from the target: cross-entropy; KL divergence (its gradients are the same); with output=logits also "
        "PFLlib's cross-entropy with the target's logits in the place of probabilities (unbounded below), or mean "
        "squared error of the logits",
        unless={"distillation_weight": (0,)},
    )
    leave_one_out: bool = setting(
        True,
        "",
        "leave a client's own outputs out of its targets; false: one mean for all",
        unless={"distillation_weight": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self._of_logits and self.output != "logits":
            raise ConfigError(
                f"algorithm.divergence={self.divergence} takes logits for a target, but clients send probabilities: "
                "set algorithm.output=logits, or another divergence"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        classes = task.network.head_shape[0]
        like = next(iter(task.network.initialize(0).values()))
        return {"nothing": {"means": like.new_zeros(classes, classes), "exist": like.new_zeros(classes)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        tables = server.get("tables", {})
        targets = Targets(tables) if tables else None
        if self.leave_one_out and targets:
            payloads = {k: {"targets": targets.without(str(k))} for k in cohort}
            replies = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        else:
            common = targets.without(None) if targets else server["nothing"]
            replies = clients.map(self.local_update, cohort, broadcast={"targets": common})
        return {"tables": {str(client): reply for client, reply in replies.items()}}

    async def local_update(self, client: Client, targets: Tree) -> Tree:
        """Trains v_k; returns its mean outputs and marks."""
        taught = self.distillation_weight > 0 and bool(targets["exist"].any())
        task = task_of(client)
        trained = await client.train(
            self._own(client),
            self.taught_objective if taught else self.objective,
            frozen={"targets": targets["means"], "exist": targets["exist"]} if taught else None,
            task=task,
        )
        client.state["local"] = trained
        client.publish(personalized=Predictor.of(trained, task=task))
        outputs = await client.outputs(lambda x, task: task.network.logits(trained, x), task=task)
        outputs = outputs.softmax(-1) if self.output == "probabilities" else outputs
        counts, means = class_means(outputs, client.examples().y, outputs.shape[1])
        return {"means": means.to(outputs), "exist": (counts > 0).to(outputs)}

    def taught_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda D(T[y], p)."""
        logits = task.logits(model, batch)
        distances = self.distance(frozen["targets"][batch.y], logits)
        return task.loss_of(logits, batch) + self.distillation_weight * batch.mean(frozen["exist"][batch.y] * distances)

    def distance(self, target: Tensor, logits: Tensor) -> Tensor:
        """D of each sample, shape (b,), from targets and logits of shape (b, C)."""
        if self.divergence == "squared_error":
            return (target - logits).square().mean(-1)
        softened = self.output == "logits" and not self._of_logits
        wanted = target.softmax(-1) if softened else target
        entropy = torch.special.entr(wanted).sum(-1) if self.divergence == "kl" else 0.0
        return -(wanted * logits.log_softmax(-1)).sum(-1) - entropy

    @property
    def _of_logits(self) -> bool:
        return self.divergence in ("raw_logits", "squared_error")

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """To newcomers the mean outputs by class, which others are sent in rounds."""
        if not context.unseen:
            return {}, {}
        tables = server.get("tables", {})
        known = Targets(tables).without(None) if tables else server["nothing"]
        return {}, {client: {"targets": known} for client in context.newcomers}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains its own model on its samples and the mean outputs of all clients."""
        await self.local_update(client, server["targets"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self._own(client), task=task_of(client))}

    @staticmethod
    def _own(client: Client) -> Tree:
        """v_k, the initial model of its architecture until the client has trained."""
        stored: Tree | None = client.state.get("local")
        return client.initial_model(task_of(client)) if stored is None else stored
