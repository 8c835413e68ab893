"""Losses of two views of each sample: negative cosines towards a fixed target, and the contrastive loss NT-Xent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize


def towards(predictions: Tensor, targets: Tensor) -> Tensor:
    """Returns by sample the mean of minus the cosines of each view's prediction and the other view's target.

    It is SimSiam's loss (Chen and He, CVPR 2021, eqs. 1 to 4). BYOL's (Grill et al., NeurIPS 2020, eq. 2 and the
    symmetric form after it) is 4 plus 4 times this, with the outputs of the target network as targets.

    Args:
        predictions: what the predictor says of both views, shape (..., n, 2, d).
        targets: projections of both views, of the same shape; no gradient flows through them.

    Returns:
        Shape (..., n).
    """
    return -cosine_similarity(predictions, targets.detach().flip(-2), dim=-1).mean(-1)


def nt_xent(
    projections: Tensor, temperature: float, present: Tensor | None = None, rows: slice = slice(None)
) -> Tensor:
    """Returns by sample the mean of its two views' normalized, temperature-scaled cross-entropies (NT-Xent).

    For a view z and the other one z' of its sample it is -log(exp(s(z, z') / T) / sum of exp(s(z, v) / T) over all
    other views v), with the cosine s (Chen et al., ICML 2020, eq. 1). A sample alone has the loss 0. It works under
    ``vmap``.

    Args:
        projections: of both views of each sample, shape (n, 2, d).
        temperature: T.
        present: 1 for a sample and 0 for padding, shape (n,), with which nothing is compared; None: no padding.
        rows: samples whose losses are returned; views of all samples are compared with theirs.

    Returns:
        Shape (n,), as far as it is in ``rows``.
    """
    count = projections.shape[0]
    unit = normalize(projections, dim=-1)
    mine, every = unit[rows].flatten(0, 1), unit.flatten(0, 1)
    place = torch.arange(2 * count, device=unit.device)
    own = place.view(count, 2)[rows].flatten()
    others = place != own[:, None]
    if present is not None:
        # Padding is compared with all samples; its losses do not count, but must be finite.
        others = others & (present > 0).repeat_interleave(2)
    cosines = mine @ every.mT / temperature
    positive = (unit[rows] * unit[rows].flip(-2)).sum(-1).flatten() / temperature
    total = torch.where(others, cosines, -torch.inf).logsumexp(-1)
    return (total - positive).view(-1, 2).mean(-1)
