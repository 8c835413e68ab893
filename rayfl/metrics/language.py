"""The next token: loss, perplexity and how often it is the most probable one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import Measures, Metric, ratio

IGNORED = -100
"""The target of a position that counts for nothing."""

_METRICS = (
    Metric("perplexity", "perplexity", "lower"),
    Metric("token_accuracy", "token accuracy", "higher", 100, 2, "%"),
    Metric("loss", "loss", "lower", unit="nats"),
)


class LanguageMeasures(Measures):
    """Means over all tokens that count, of all samples together: ``perplexity`` is the exponential of ``loss``."""

    size = 4
    metrics = _METRICS

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """See the base class; log-probabilities of shape (n, T, V) and tokens of shape (n, T)."""
        counts = targets != IGNORED
        chosen = predictions.gather(2, targets.where(counts, 0)[..., None])[..., 0].double()
        hits = (predictions.argmax(2) == targets) & counts
        samples = torch.ones_like(chosen[:, 0]).sum()
        return torch.stack([samples, counts.sum().double(), -(chosen * counts).sum(), hits.sum().double()])

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        tokens = vectors[..., 1]
        loss = ratio(vectors[..., 2], tokens)
        return {"perplexity": np.exp(loss), "token_accuracy": ratio(vectors[..., 3], tokens), "loss": loss}

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "every position is ignored"
