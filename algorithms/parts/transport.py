"""Unbalanced optimal transport between the patches of an image and a few texts, by scaling in the log-domain."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def transport_plan(similarity: Tensor, mass: float, regularization: float, iterations: int) -> Tensor:
    """Returns the entropic plan T that moves a mass from patches to texts, of the shape of ``similarity``; a constant.

    With K = exp(-(1 - S) / lambda), T is the matrix with T 1 <= 1/P and T^T 1 = gamma / N that is nearest to K in
    Kullback-Leibler divergence. It is T = diag(u) K diag(v), found by alternating, from v = 1 on,

        u = min(1 / (P K v), 1),    v = gamma / (N K^T u)

    which ends with v, so that the texts' masses are exact, and the patches' limits are kept as well as the number of
    iterations allows.

    Args:
        similarity: S, cosines of P patches and N texts, shape (..., P, N); gradients do not flow through the plan.
        mass: gamma, of 1; with 1 the limits of the patches are equalities in the end.
        regularization: lambda.
        iterations: how many pairs of steps are taken.
    """
    with torch.no_grad():
        kernel = (similarity.detach() - 1) / regularization
        patches, texts = kernel.shape[-2:]
        v = torch.zeros_like(kernel[..., 0, :])
        u = torch.zeros_like(kernel[..., 0])
        for _ in range(iterations):
            u = (-math.log(patches) - torch.logsumexp(kernel + v.unsqueeze(-2), -1)).clamp(max=0)
            v = math.log(mass / texts) - torch.logsumexp(kernel + u.unsqueeze(-1), -2)
        return (kernel + u.unsqueeze(-1) + v.unsqueeze(-2)).exp()
