"""Pairs of answers of which one is preferred: losses of alignment, and how often a model prefers the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

Alignment = Literal["dpo", "ipo", "simpo", "orpo"]
"""A loss of a pair of answers."""

BETAS: Mapping[Alignment, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0}
"""The usual beta of the losses that have one."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a pair of answers to a prompt x: w, which is preferred, and l.

    With log pi(y) the sum of the log-probabilities of an answer's tokens given those before, |y| their number, pi_ref
    the model that the run begins with, and s the logistic function:

    - ``dpo``: -(1 - e) log s(h) - e log s(-h), with h = b (log pi(w)/pi_ref(w) - log pi(l)/pi_ref(l)). Rafailov et al.:
      Direct Preference Optimization, NeurIPS 2023, equation 7. e, the share of pairs that are taken to be the wrong way
      round, is of Mitchell's conservative DPO (2023).
    - ``ipo``: (h/b - 1/(2 b))^2, where the log-probabilities in h are means over an answer's tokens. Azar et al.: A
      General Theoretical Paradigm to Understand Learning from Human Preferences, AISTATS 2024, equation 17, whose sums
      over tokens TRL has replaced by means, too.
    - ``simpo``: -log s(h - g), with h = b (log pi(w)/|w| - log pi(l)/|l|). Meng, Xia, Chen: SimPO, NeurIPS 2024,
      equation 6.
    - ``orpo``: -log pi(w)/|w| - v log s(h), with h = log odds(w) - log odds(l), odds(y) = P(y) / (1 - P(y)) and
      log P(y) = log pi(y)/|y|. Hong, Lee, Thorne: ORPO, EMNLP 2024, equations 4 to 7.

    h is the pair's margin: by how much the model prefers the answer that is preferred.

    Attributes:
        kind: which loss.
        beta: b.
        label_smoothing: e, of dpo.
        gamma: g, of simpo: the margin that is aimed at.
        odds_weight: v, of orpo.
    """

    kind: Alignment = "dpo"
    beta: float = BETAS["dpo"]
    label_smoothing: float = 0.0
    gamma: float = 0.5
    odds_weight: float = 0.1

    @property
    def has_reference(self) -> bool:
        """Returns whether pi_ref is in the loss."""
        return self.kind in ("dpo", "ipo")

    def __call__(self, policy: Tensor, lengths: Tensor, reference: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns losses and margins, each of shape (...); works under ``vmap``.

        Args:
            policy: log pi of both answers, the preferred one first, shape (..., 2).
            lengths: their numbers of tokens, of the same shape; at least 1 where a pair counts.
            reference: log pi_ref of both; None for losses without it.
        """
        if self.kind != "dpo":
            share = 1 / lengths.clamp(min=1).to(policy.dtype)
            policy, reference = policy * share, None if reference is None else reference * share
        if reference is not None:
            policy = policy - reference
        if self.kind == "orpo":
            below = policy.clamp(max=-torch.finfo(policy.dtype).eps)  # log(1 - P) needs P < 1
            margin = _difference(below - (-below.expm1()).log())
            return -policy[..., 0] - self.odds_weight * logsigmoid(margin), margin
        difference = _difference(policy)
        margin = self.beta * difference
        if self.kind == "ipo":
            return (difference - 1 / (2 * self.beta)).square(), margin
        if self.kind == "simpo":
            return -logsigmoid(margin - self.gamma), margin
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin), margin


def _difference(pair: Tensor) -> Tensor:
    return pair[..., 0] - pair[..., 1]


class PreferenceMeasures(MeasuresBySample):
    """The share of pairs with a positive margin, the mean margin and the mean loss; see :class:`PreferenceLoss`.

    A pair whose margin is 0 is not counted as preferred. With a reference all margins are 0 before any training.
    """

    size = 4
    metrics = (
        Metric("preference_accuracy", "preference accuracy", "higher", 100, 2, "%"),
        Metric("margin", "margin", "higher"),
        Metric("loss", "loss", "lower", digits=4),
    )

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class.

        Args:
            predictions: loss and margin of each pair, shape (n, 2): unlike those of other tasks, they are made with the
                targets.
            targets: of the pairs, n rows, which are not read.
        """
        losses, margins = predictions.double().unbind(-1)
        return (torch.stack([torch.ones_like(losses), (margins > 0).double(), margins, losses], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        names = (metric.name for metric in self.metrics)
        return {name: ratio(vectors[..., place], vectors[..., 0]) for place, name in enumerate(names, 1)}
