"""FedRCL: features of a class drawn together against other classes, and apart where they are too much alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.objectives import Sum, function, loss
from rayfl.tasks.base import Batch, Task, Trait


class FedRCL(FineTuned):
    """FedRCL (relaxed contrastive learning): a supervised contrast of features that does not let classes collapse.

    With s_ij = cos(z_i, z_j) of the features of a mini-batch of n samples, clients minimise
    CE + alpha mean_i S_i + beta mean_i D_i with

        S_i = 1/P sum_{j in P_i} log(1 + sum_{k in N_i} e^((s_ik - s_ij) / tau))
        D_i = 1/P log(1 + sum_{j in Q_i} e^((s_ij - 1) / tau))

    N_i are the N samples of other classes that are most like i, P_i the P samples of its class, itself included, that
    are least like it: S draws a class together. Q_i are the P other samples of its class that are least like it, as far
    as s_ij is lambda or more: D drives apart what is alike already. With alpha = beta = 0 it is federated averaging.

    A sample without others of its class has D_i = 0, and P_i is itself, which has no gradient in s_ii = 1: it is only
    driven away from other classes. Where a mini-batch has one class, S = 0. Features are the input of the last linear
    layer.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model on the cross-entropy alone.

    References:
        Seo, Kim, Kim, Han: Relaxed Contrastive Learning for Federated Learning, CVPR 2024 (arXiv 2401.04928); formulas
        of the authors' code.
    """

    name: Literal["fedrcl"] = "fedrcl"
    citation: ClassVar[str] = "Seo et al., CVPR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {
        "features": "it contrasts the features of samples",
        "classes": "it contrasts samples of a class with those of others",
    }

    contrast_weight: float = setting(1.0, "alpha", "weight of the contrast S", ge=0)
    penalty_weight: float = setting(1.0, "beta", "weight of the divergence penalty D, which relaxes S", ge=0)
    threshold: float = setting(
        0.7,
        "lambda",
        "samples of a class that are this much alike are driven apart",
        ge=-1,
        le=1,
        unless={"penalty_weight": (0,)},
    )
    temperature: float = setting(0.05, "tau", "temperature of S and D", gt=0)
    positives: int = setting(1, "P", "samples of the own class, those that are least alike", ge=1)
    negatives: int = setting(
        2, "N", "samples of other classes, those that are most alike", ge=1, unless={"contrast_weight": (0,)}
    )

    @property
    def objective(self) -> Sum:
        """CE + alpha S + beta D, from one forward pass."""
        return loss() if self.contrast_weight == self.penalty_weight == 0 else function(self._contrasted)

    def _contrasted(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        return task.loss_of(logits, batch) + batch.mean(self.relaxed(features, batch))

    def relaxed(self, features: Tensor, batch: Batch) -> Tensor:
        """alpha S_i + beta D_i, shape (b,); 0 for padding.

        Args:
            features: shape (b, f).
            batch: the labels, and what is padding.
        """
        counted = torch.ones_like(batch.y, dtype=torch.bool) if batch.mask is None else batch.mask > 0
        units = F.normalize(torch.where(counted[:, None], features, 0.0), dim=-1)
        alike = units @ units.T
        pairs, same = counted[:, None] & counted, batch.y[:, None] == batch.y
        itself = torch.eye(len(alike), dtype=torch.bool, device=alike.device)
        value = torch.zeros_like(alike[:, 0])
        if self.contrast_weight:
            value = value + self.contrast_weight * self._contrast(alike, pairs & same, pairs & ~same)
        if self.penalty_weight:
            value = value + self.penalty_weight * self._penalty(alike, pairs & same & ~itself)
        return value

    def _contrast(self, alike: Tensor, own: Tensor, other: Tensor) -> Tensor:
        """S_i, shape (b,), of s_ij and of marks of the own and of other classes, all of shape (b, b)."""
        near = _first(alike, other, self.negatives, largest=True)
        against = _log_sum(near / self.temperature, near > -torch.inf)
        far = _first(alike, own, self.positives, largest=False)
        there = far < torch.inf
        terms = F.softplus(against[:, None] - torch.where(there, far, 0.0) / self.temperature)
        return torch.where(there, terms, 0.0).sum(-1) / self.positives

    def _penalty(self, alike: Tensor, own: Tensor) -> Tensor:
        """D_i, shape (b,), of s_ij and of marks of the others of the own class, both of shape (b, b)."""
        far = _first(alike, own, self.positives, largest=False)
        counted = (far >= self.threshold) & (far < torch.inf)
        against = _log_sum(torch.where(counted, far, 0.0) / self.temperature, counted)
        return F.softplus(against - alike.diagonal() / self.temperature) / self.positives


def _first(values: Tensor, counted: Tensor, number: int, largest: bool) -> Tensor:
    """The largest or smallest values of each row that count, infinite where there are fewer."""
    last = -torch.inf if largest else torch.inf
    return torch.where(counted, values, last).topk(min(number, len(values)), largest=largest).values


def _log_sum(exponents: Tensor, counted: Tensor) -> Tensor:
    """log sum exp over the columns that count; so low where none does that softplus and its slope are 0."""
    least = torch.finfo(exponents.dtype).min / 8
    return torch.where(counted, exponents, least).logsumexp(-1)
