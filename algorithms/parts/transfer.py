"""Losses by which a trained model takes over the knowledge of a frozen one.

The gradient of each flows into whatever produced the student's tensors; the teacher's are meant to be constants.
All are masked: the padding of a batch contributes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rayfl.tasks.base import Batch

OneSample = Literal["skip", "paper"]
ONE_SAMPLE = (
    "mini-batches of one sample: without the discrepancy, which one sample a side does not define (skip), or with the "
    "papers' estimate of it, whose gradient is then unbounded (paper)"
)
"""What options of that type mean."""

_BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
_TINY = 1e-8


def distillation(
    student: Tensor, teacher: Tensor, batch: Batch, temperature: float = 4.0, form: Literal["paper", "code"] = "paper"
) -> Tensor:
    """Knowledge distillation of logits of shape (b, C); a scalar.

    Args:
        student: logits of the trained model.
        teacher: logits of the frozen model.
        batch: the mini-batch they belong to.
        temperature: tau.
        form: ``paper``: tau^2 times the mean of KL(softmax(teacher / tau) || softmax(student / tau));
            ``code``: the mean cross-entropy of softmax(student) against softmax(teacher / tau), which is not
            stationary where the two agree.
    """
    target = teacher / temperature
    if form == "code":
        return batch.mean(-(target.softmax(-1) * student.log_softmax(-1)).sum(-1))
    scaled = student / temperature
    # sum p (t - s) - lse(t) + lse(s): value and gradient are exactly 0 where the logits agree to the bit
    shift, target_shift = scaled.logsumexp(-1), target.logsumexp(-1)
    probability = (target - target_shift[..., None]).exp()
    divergence = (probability * (target - scaled)).sum(-1) - target_shift + shift
    return temperature**2 * batch.mean(divergence)


def limited(logits: Tensor, classes: Tensor | None) -> Tensor:
    """Logits of shape (b, C) without those of other classes, which get no probability and no gradient.

    Args:
        logits: of all classes.
        classes: which ones stay, bool of shape (C,); None: all.
    """
    return logits if classes is None else torch.where(classes, logits, torch.finfo(logits.dtype).min / 2)


def half_squared_distance(student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    """The mean over samples of half the squared distance of their features, of shape (b, f); a scalar."""
    return batch.mean(((student - teacher) ** 2).sum(-1) / 2)


def maximum_mean_discrepancy(student: Tensor, teacher: Tensor, batch: Batch, one_sample: OneSample = "skip") -> Tensor:
    """The squared distance of the two kernel means of features of shape (b, f); a scalar.

    The biased estimate (V-statistic) under a sum of five Gaussian kernels exp(-D / (s 2^i)), i = -2..2, where D is
    the squared distance of two samples and s, a constant for the gradient, its mean over the pairs of the
    2b stacked samples.

    Of one sample a side the value is a constant, but its gradient, with s held, is about 4.8 divided by the distance
    of the two: it has no bound, and a step along it ruins a model that is near its teacher.

    Args:
        student: features of the trained model.
        teacher: features of the frozen model.
        batch: the mini-batch they belong to.
        one_sample: ``skip``: the value and its gradient are 0 where the batch has fewer than two samples; ``paper``:
            the estimate as it is.

    References:
        Long, Cao, Wang, Jordan: Learning Transferable Features with Deep Adaptation Networks, ICML 2015, eqs. 1-2.
    """
    weights = torch.ones_like(student[:, 0]) if batch.mask is None else batch.mask
    valid = torch.cat([weights, weights])
    counted = valid > 0
    if one_sample == "skip":
        counted = counted & (weights.sum() >= 2)
    # What does not count is replaced, not multiplied away: nothing keeps the distances of padding rows finite. Where
    # nothing counts all samples are equal, so that there is neither a value nor a gradient.
    samples = torch.where(counted[:, None], torch.cat([student, teacher]), 0.0)
    distances = _squared_distances(samples, valid)
    count = valid.sum()
    bandwidth = (valid @ distances @ valid / (count * count - count) + _TINY).detach()
    kernel = torch.stack([torch.exp(-distances / (bandwidth * factor)) for factor in _BANDWIDTHS]).sum(0)
    return _between_means(kernel, weights)


def fixed_kernel_discrepancy(student: Tensor, teacher: Tensor, batch: Batch, bandwidths: Sequence[float]) -> Tensor:
    """The squared distance of the kernel means of features of shape (b, f) under kernels that are given; a scalar.

    The biased estimate (V-statistic) under the sum of the kernels exp(-D / (2 a)), where D is the squared distance of
    two samples. It is 0, without a gradient, where both sides agree, also for a mini-batch of one sample.

    Args:
        student: features of the trained model.
        teacher: features of the frozen model.
        batch: the mini-batch they belong to.
        bandwidths: the numbers a.
    """
    weights = torch.ones_like(student[:, 0]) if batch.mask is None else batch.mask
    valid = torch.cat([weights, weights])
    samples = torch.where(valid[:, None] > 0, torch.cat([student, teacher]), 0.0)
    distances = _squared_distances(samples, valid)
    return _between_means(torch.stack([torch.exp(-distances / (2 * a)) for a in bandwidths]).sum(0), weights)


def _between_means(kernel: Tensor, weights: Tensor) -> Tensor:
    """mean(XX) + mean(YY) - mean(XY) - mean(YX) of the kernel's values (2b, 2b), as one quadratic form."""
    signs = torch.cat([weights, -weights]) / weights.sum()
    return signs @ kernel @ signs


def _squared_distances(samples: Tensor, valid: Tensor) -> Tensor:
    """Squared distances between the rows of (m, f) as (m, m), from one matrix product instead of m^2 f differences.

    Distances do not change when all rows are moved, but the cancellation in the product does: the valid rows are
    centred first.
    """
    centre = (valid @ samples / valid.sum()).detach()
    centred = samples - centre
    products = centred @ centred.T
    norms = products.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * products).clamp_min(0)
