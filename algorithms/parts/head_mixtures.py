"""Two heads on the features of one body, with a weight of its own for every test sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.heads import head_logits
from rayfl.tasks.base import Model

_BETAS, _EPS = (0.9, 0.999), 1e-8
_COSINE_EPS = 1e-6


@dataclass(frozen=True)
class MixedHeads:
    """How a test sample chooses the weight e of the global head; 1 - e is that of the personal one.

    Attributes:
        first_weight: e_0.
        steps: of Adam, on the two numbers whose softmax is (e, 1 - e).
        lr: of these.
        sample_share: beta, the share of the sample in what is compared with mean features.
        history_rate: alpha, the share of the newest sample in the moving mean of the samples so far.

    Source: Jiang, Lin: Test-Time Robust Personalization for Federated Learning, ICLR 2023.
    """

    first_weight: float
    steps: int
    lr: float
    sample_share: float
    history_rate: float

    def predictions(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        """Returns log-probabilities of shape (b, C).

        Args:
            models: the model with the global head; the personal head; mean features (d,), ``global`` and ``personal``;
                and what the samples so far have left, to which these add theirs: at first nothing.
            x: the next samples, b of them.
            task: has the network.
        """
        model, head, means, seen = models
        features, generic = task.network.head_inputs_and_logits(model, x, training=False)
        own = head_logits(task.network, head, features)
        compared = self.compared(features, seen)
        distances = [(compared - means[key]).norm(dim=1) for key in ("global", "personal")]
        weights = self.weights(generic, own, distances[0] - distances[1])
        found: Tensor = torch.lerp(own, generic, weights[:, None]).log_softmax(-1)
        return found

    def compared(self, features: Tensor, seen: Any) -> Tensor:
        """Returns phi of each sample, shape (b, d).

        Args:
            features: of samples in their order, shape (b, d).
            seen: ``mean``, the moving mean of the samples before; without it the first of these begins it.
        """
        if self.sample_share == 1:
            return features
        means, last = [], seen.get("mean")
        for row in features:
            last = row if last is None else torch.lerp(last, row, self.history_rate)
            means.append(last)
        seen["mean"] = last
        return torch.lerp(torch.stack(means), features, self.sample_share)

    def weights(self, generic: Tensor, own: Tensor, farther: Tensor) -> Tensor:
        """Returns e of each sample, shape (b,).

        Adam's steps on two numbers whose gradients are opposite are opposite, so that one of them tells both.

        Args:
            generic: logits of the global head, shape (b, C).
            own: those of the personal head.
            farther: how much farther the sample is from the global mean features than from the client's, shape (b,).
        """
        start = torch.logit(generic.new_full((len(generic),), self.first_weight))
        alike = F.cosine_similarity(generic.softmax(-1), own.softmax(-1), dim=1, eps=_COSINE_EPS)
        moved, first, second = (torch.zeros_like(start) for _ in range(3))
        weights = torch.sigmoid(start)
        for step in range(1, self.steps + 1):
            log_p = torch.lerp(own, generic, weights[:, None]).log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(1, keepdim=True)
            steeper = -(p * (log_p + entropy) * (generic - own)).sum(1)  # the derivative of the entropy
            slope = weights * (1 - weights) * (alike * steeper + (1 - alike) * farther)
            first = torch.lerp(first, slope, 1 - _BETAS[0])
            second = torch.lerp(second, slope.square(), 1 - _BETAS[1])
            corrected = (second / (1 - _BETAS[1] ** step)).sqrt() + _EPS
            moved = moved - self.lr * (first / (1 - _BETAS[0] ** step)) / corrected
            weights = torch.sigmoid(start + 2 * moved)
        return weights
