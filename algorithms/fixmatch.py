"""FedAvg with FixMatch: clients learn from unlabelled images what they are sure of, and are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.proximity import proximity
from algorithms.parts.weak_strong import WeakAndStrong, mean_where, paired_samples, pseudo_labels
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.objectives import TRAINED, Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FixMatch(WeakAndStrong, FineTuned):
    """FedAvg+FixMatch: federated averaging whose clients learn by FixMatch from labelled and unlabelled images.

    A step has B labelled images x with their classes y, and mu B unlabelled images u. With weak changes a(.), strong
    changes A(.), q = softmax(f(a(u))), its likeliest class q* and p_m the model's softmax, it goes down

        1/B sum_x CE(f(a(x)), y) + lambda_u 1/(mu B) sum_u 1[max q >= tau] CE(f(A(u)), q*)

    where no gradient flows through q, and f has running statistics and dropout of training in both. With
    ``proximal_weight`` it is FedProx+FixMatch: + mu_p/2 ||theta - w||^2, with w the received model.

    Steps are those of the local epochs over the unlabelled images, in mini-batches of mu B; labelled images come again
    and again, in a new order each time. A client without unlabelled images trains on the labelled ones alone.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k, all training samples with or without labels. Evaluated:
    w (``global``), and with ``finetune_epochs`` w fine-tuned by each client on its labelled samples.

    References:
        Sohn, Berthelot, Li, Zhang, Carlini, Cubuk, Kurakin, Zhang, Raffel: FixMatch: Simplifying Semi-Supervised
        Learning with Consistency and Confidence, NeurIPS 2020 (arXiv 2001.07685), eqs. 3 and 4; averaged as in McMahan
        et al., AISTATS 2017. It is a baseline of SemiFL (Diao et al., NeurIPS 2022) and FedMatch (Jeong et al., ICLR
        2021).
    """

    name: Literal["fixmatch"] = "fixmatch"
    citation: ClassVar[str] = "Sohn et al., NeurIPS 2020"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "what it is sure of is a class",
        "distribution": "how sure it is is a probability",
    }

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "samples",
        "q_k",
        "weights of the mean: samples n_k / sum over the cohort; uniform 1/|S|; population n_k / sum over all clients, "
        "the rest staying on the old server model",
    )
    unlabelled_weight: float = setting(1.0, "lambda_u", "weight of the loss on unlabelled images", ge=0)
    unlabelled_ratio: int = setting(7, "mu", "unlabelled images in a step for each labelled one", ge=1)
    proximal_weight: float = setting(0.0, "mu_p", "weight of the proximal term; 0: FedAvg+FixMatch", ge=0)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        labelled, others = client.examples(), client.unlabelled()
        frozen = {"received": model} if self.proximal_weight else None
        if len(others):
            trained = await client.train(
                model,
                self.objective,
                frozen=frozen,
                examples=Examples(torch.cat([labelled.x, others.x]), torch.cat([labelled.y, others.y])),
                plan=client.paired_batches(len(labelled), len(others), self.unlabelled_ratio),
                views=client.context.views,
            )
        else:
            trained = await client.train(model, loss() + self._proximal_term, frozen=frozen)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def weighted(self, client: Client, tree: Tree) -> Weighted:
        """A client's contribution, of which unlabelled samples count as labelled ones."""
        uniform = self.aggregation == "uniform"
        return Weighted(tree, 1 if uniform else client.num_samples + client.num_unlabelled)

    def samples_in_steps(self, train: TrainConfig, labelled: int, unlabelled: int) -> int:
        if not unlabelled:
            return super().samples_in_steps(train, labelled, unlabelled)
        return paired_samples(train, labelled, unlabelled, self.unlabelled_ratio)

    @property
    def objective(self) -> Sum:
        """The losses on labelled and unlabelled images, and the proximal term."""
        return function(self._losses) + self._proximal_term

    @property
    def _proximal_term(self) -> Sum:
        return self.proximal_weight * proximity("half_squared", TRAINED, "received")

    def _losses(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        weak, strong = (task.logits(model, replace(batch, x=batch.x[:, view])) for view in (0, 1))
        known = (batch.y >= 0).to(weak.dtype)
        present = torch.ones_like(known) if batch.mask is None else batch.mask
        classes, sure = pseudo_labels(weak, self.threshold)
        supervised = cross_entropy(weak, batch.y.clamp(min=0), reduction="none")
        consistent = cross_entropy(strong, classes, reduction="none")
        labelled, others = known * present, (1 - known) * present
        found: Tensor = mean_where(supervised, labelled, labelled)
        return found + self.unlabelled_weight * mean_where(consistent, sure * others, others)
