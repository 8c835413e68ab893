"""Survival: Cox's partial likelihood, and Harrell's concordance index of all pairs of a set of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, ratio

_PAIRS = 1 << 22
"""Pairs that are compared at a time: what is computed of them is then of 100 MiB."""


def cox_losses(risk: Tensor, y: Tensor, present: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
    """Returns minus the logarithm of Cox's partial likelihood by sample (Cox, 1972), ties as in Breslow (1974).

    A sample whose event was seen at time t has the loss log(sum of exp(risk_j) over all j with time_j >= t) - risk. The
    others have the loss 0. It works under ``vmap``.

    Args:
        risk: logarithms of the samples' hazard ratios, shape (..., n).
        y: time and event of each sample, shape (..., n, 2).
        present: 1 for a sample and 0 for padding, of the shape of ``risk``; padding has the loss 0. None: no padding.
        rows: samples whose losses are returned; all samples are at risk.

    Returns:
        Losses of the shape of ``risk``, as far as they are in ``rows``.
    """
    time, event = y[..., 0], y[..., rows, 1]
    at_risk = time[..., None, :] >= time[..., rows, None]
    if present is not None:
        counts = present > 0
        # What padding is compared with does not matter, but one of it must be there: log 0 has no gradient.
        at_risk = at_risk & (counts[..., None, :] | ~counts[..., rows, None])
        event = event * present[..., rows]
    total = torch.where(at_risk, risk[..., None, :], -torch.inf).logsumexp(-1)
    # Padding repeats other samples, whose risks may not be finite: times 0 they would be no 0.
    return torch.where(event > 0, total - risk[..., rows], 0)


class SurvivalMeasures(MeasuresBySample):
    """Harrell's concordance index, and the mean of :func:`cox_losses`.

    Of two samples one surely had its event first if its event was seen, and the other's time is later, or the same
    without an event. The concordance index is the share of these pairs in which the first one has the higher predicted
    risk; equal risks count half (Harrell et al., 1996). Sums over clients are of pairs within clients.
    """

    metrics = (Metric("c_index", "C-index", "higher"), Metric("loss", "Cox loss", "lower", digits=4))
    size = 4
    compares = True

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; risks of shape (n, 1), and targets of shape (n, 2). One tensor of shape (n, 3)."""
        return (torch.cat([predictions.double(), targets.double()], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class; samples, sum of losses, pairs in the right order, pairs."""
        risk, y = found[0][..., 0], found[0][..., 1:]
        present = torch.ones_like(risk) if mask is None else mask.to(risk.dtype)
        count = present.sum(-1)
        sums = torch.stack([count, *[torch.zeros_like(count)] * 3], -1)
        width = max(_PAIRS // max(risk.numel(), 1), 1)
        for first in range(0, risk.shape[-1], width):
            rows = slice(first, first + width)
            right, pairs = _concordant(risk, y, present > 0, rows)
            sums[..., 1:] += torch.stack([cox_losses(risk, y, present, rows).sum(-1), right, pairs], -1)
        return sums

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {"c_index": ratio(vectors[..., 2], vectors[..., 3]), "loss": ratio(vectors[..., 1], vectors[..., 0])}

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "of no two samples is it known which had its event first" if name == "c_index" else ""


def _concordant(risk: Tensor, y: Tensor, present: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns how many pairs are in the right order, and how many there are, whose first ones are in ``rows``."""
    time, event = y[..., 0], y[..., 1] > 0
    mine, own = time[..., rows, None], risk[..., rows, None]
    later = (time[..., None, :] > mine) | ((time[..., None, :] == mine) & ~event[..., None, :])
    pairs = later & (event & present)[..., rows, None] & present[..., None, :]
    right = (own > risk[..., None, :]) + 0.5 * (own == risk[..., None, :])
    return (right.double() * pairs).sum((-2, -1)), pairs.sum((-2, -1)).double()
