"""FedUV: probabilities that vary over a mini-batch as those of all classes would, and features spread apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.objectives import Sum, function, loss
from rayfl.tasks.base import Batch, Task, Trait


class FedUV(FineTuned):
    """FedUV (uniformity and variance): local training as if a client had samples of all classes alike.

    With p_c the probabilities of class c over the n samples of a mini-batch, z their features and C the number of
    classes, clients minimise CE + lambda V + mu U with

        V = 1/C sum_c max(0, gamma - std(p_c)),    gamma = 1/sqrt(C)
        U = mean over pairs i < j of exp(-||z_i - z_j||^2 / s),    s = median of ||z_i - z_j||^2

    V draws up the standard deviation (with n - 1) of each class's probability to gamma, that of one-hot labels with one
    sample of each class: a client without samples of a class would else let its probability go to 0. U drives features
    apart, towards a uniform distribution. The median is over pairs that differ (the lower one of two), and is part of
    what the gradient goes through, so that U does not change when all features are scaled. Features are the input of
    the last linear layer. Distances take n^2 f numbers of memory, for f features.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model on the cross-entropy alone. A mini-batch of one sample has neither V nor U.

    References:
        Son, Kim, Chung, Huang, Liu: FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024
        (arXiv 2402.18372); formulas of the authors' code.
    """

    name: Literal["feduv"] = "feduv"
    citation: ClassVar[str] = "Son et al., CVPR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {
        "features": "it spreads the features of samples",
        "distribution": "it varies the probabilities of classes",
    }

    variance_weight: float = setting(2.5, "lambda", "weight of V, of the probabilities' deviations", ge=0)
    uniformity_weight: float = setting(0.5, "mu", "weight of U, of the features' nearness", ge=0)

    @property
    def objective(self) -> Sum:
        """CE + lambda V + mu U, from one forward pass."""
        return loss() if self.variance_weight == self.uniformity_weight == 0 else function(self._regularized)

    def _regularized(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        value = task.loss_of(logits, batch)
        if self.variance_weight:
            value = value + self.variance_weight * lack_of_variance(logits, batch)
        if self.uniformity_weight:
            value = value + self.uniformity_weight * nearness(features, batch)
        return value


def lack_of_variance(logits: Tensor, batch: Batch) -> Tensor:
    """V, a scalar; 0 for a single sample.

    Args:
        logits: shape (b, C).
        batch: tells samples from padding.
    """
    counted = _counted(logits, batch)[:, None]
    number = counted.sum()
    # what does not count is replaced, not multiplied away: nothing keeps padding finite
    probabilities = torch.where(counted, logits, 0.0).softmax(-1)
    mean = (probabilities * counted).sum(0) / number
    squares = ((probabilities - mean).square() * counted).sum(0) / (number - 1).clamp_min(1)
    # the root has no gradient where all probabilities are alike
    varies = squares > 0
    deviations = torch.where(varies, torch.where(varies, squares, 1.0).sqrt(), 0.0)
    lacking = (1 / math.sqrt(logits.shape[-1]) - deviations).clamp_min(0).mean()
    return torch.where(number > 1, lacking, 0.0)


def nearness(features: Tensor, batch: Batch) -> Tensor:
    """U, a scalar; 0 for a single sample.

    Args:
        features: shape (b, f).
        batch: tells samples from padding.
    """
    counted = _counted(features, batch)
    samples = torch.where(counted[:, None], features, 0.0)
    # differences, not a matrix product: samples that are equal have a distance of exactly 0
    distances = (samples[:, None] - samples).square().sum(-1)
    pairs = (counted[:, None] & counted).triu(1)
    differ = pairs & (distances > 0)
    scale = median(distances.flatten(), differ.flatten())
    kernel = torch.where(pairs, torch.exp(-distances / scale), 0.0)
    return kernel.sum() / pairs.sum().clamp_min(1)


def median(values: Tensor, counted: Tensor) -> Tensor:
    """The lower median of the values that count, as PyTorch's; 1 where none does.

    Args:
        values: shape (m,), not negative.
        counted: bool, shape (m,).
    """
    ordered = torch.where(counted, values, torch.inf).sort().values
    number = counted.sum()
    found = ordered.gather(0, ((number - 1).clamp_min(0) // 2)[None])[0]
    return torch.where(number > 0, found, 1.0)


def _counted(rows: Tensor, batch: Batch) -> Tensor:
    """Which rows are samples, bool, shape (b,)."""
    return torch.ones_like(rows[:, 0], dtype=torch.bool) if batch.mask is None else batch.mask > 0
