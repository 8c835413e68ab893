"""Classifiers that are nearly a simplex equiangular tight frame although most of their elements are zero."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from algorithms.parts.replaced_heads import simplex_etf
from rayfl.optimization.optimizers import Rule
from rayfl.randomness import RandomStreams

_STREAM = "init.classifier"
_WIDEST = 1 - 1e-5
"""The largest cosine of which the angle has a slope that can be stepped along."""


def kept_elements(classes: int, dim: int, sparsity: float, streams: RandomStreams) -> np.ndarray:
    """Which elements are not zero, bool of shape (C, d); floor(beta C d), drawn from all, are.

    Args:
        classes: C.
        dim: d.
        sparsity: beta.
        streams: the experiment's randomness; uses the stream ``init.classifier.zeros``.
    """
    count = classes * dim
    kept = np.ones(count, dtype=bool)
    generator = streams.generator(f"{_STREAM}.zeros")
    kept[generator.choice(count, size=int(sparsity * count), replace=False)] = False
    return kept.reshape(classes, dim)


@lru_cache(maxsize=8)  # a run asks several times
def sparse_simplex(classes: int, dim: int, sparsity: float, norm: float, steps: int, streams: RandomStreams) -> Tensor:
    """Vectors of one length that are far apart, with zeros, shape (C, d), float64; nobody may change them.

    Those of a simplex equiangular tight frame lose the elements that are not :func:`kept_elements`. Steps of Adam, of
    learning rate 1/steps, then move the others down

        sum_c (||w_c|| - gamma)^2 - 1/C sum_c min_{j != c} arccos(cos(w_c, w_j))

    (Xiao et al., FedLoGe, ICLR 2024; the authors' code has 10,000 steps of 0.0001).

    Args:
        classes: C, at least 2; each has an element that is kept.
        dim: d, at least C.
        sparsity: beta, share of the elements that are zero.
        norm: gamma.
        steps: of Adam.
        streams: the experiment's randomness; uses the streams ``init.classifier`` and ``init.classifier.zeros``.
    """
    mask = torch.from_numpy(kept_elements(classes, dim, sparsity, streams))
    vectors = (simplex_etf(classes, dim, streams.generator(_STREAM)) * mask).requires_grad_()
    adam, itself = Rule(lr=1 / max(steps, 1), optimizer="adam"), torch.eye(classes, dtype=torch.bool)
    slots = [[torch.zeros(classes, dim, dtype=vectors.dtype)] for _ in adam.slots]
    for step in range(steps):
        lengths = vectors.norm(dim=1)
        directions = vectors / lengths[:, None]
        nearest = (directions @ directions.T).masked_fill(itself, -1).amax(1)
        angles = nearest.clamp(-_WIDEST, _WIDEST).arccos()
        loss = (lengths - norm).square().sum() - angles.mean()
        (slope,) = torch.autograd.grad(loss, [vectors])
        with torch.no_grad():
            adam.step([vectors], [slope * mask], slots, torch.tensor(step + 1.0))
    return vectors.detach()
