"""The next token: loss, perplexity, how often it is the most probable one, and how often all of a text are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

IGNORED = -100
"""The target of a position that counts for nothing."""

_METRICS = (
    Metric("perplexity", "perplexity", "lower"),
    Metric("token_accuracy", "token accuracy", "higher", 100, 2, "%"),
    Metric("exact_match", "exact match", "higher", 100, 2, "%"),
    Metric("loss", "loss", "lower", unit="nats"),
)


class LanguageMeasures(MeasuresBySample):
    """Means over all tokens that count, of all samples together: ``perplexity`` is the exponential of ``loss``.

    ``exact_match`` is the share of samples all of whose tokens that count are the most probable ones after the tokens
    that do come before them: those that greedy decoding, begun with the rest of the sample, gives right to the end.
    """

    size = 6
    metrics = _METRICS

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; log-probabilities of shape (n, T, V) and tokens of shape (n, T)."""
        chosen = predictions.gather(2, targets.where(targets != IGNORED, 0)[..., None])[..., 0]
        return self.of_tokens(chosen, predictions.argmax(2) == targets, targets)

    def of_tokens(self, chosen: Tensor, hits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """The same as :meth:`by_sample`, of what is known of each position.

        Args:
            chosen: log-probabilities of the targets, shape (n, T); anything finite where none is asked for.
            hits: whether the target is the most probable token, bool of shape (n, T).
            targets: shape (n, T).

        Returns:
            One tensor, float64 of shape (n, ``size``).
        """
        counts = targets != IGNORED
        asked = counts.any(1)
        hits = hits & ~chosen.isnan()  # argmax takes NaN for the largest
        exact = (hits | ~counts).all(1) & asked
        sums = [counts.sum(1), -(chosen.double() * counts).sum(1), (hits & counts).sum(1), asked, exact]
        return (torch.stack([torch.ones_like(asked, dtype=torch.float64), *(one.double() for one in sums)], 1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        tokens = vectors[..., 1]
        loss = ratio(vectors[..., 2], tokens)
        return {
            "perplexity": np.exp(loss),
            "token_accuracy": ratio(vectors[..., 3], tokens),
            "exact_match": ratio(vectors[..., 5], vectors[..., 4]),
            "loss": loss,
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "every position is ignored"
