"""Sums of features by class, and the Gaussians that they give, one covariance for each class.

A tree ``moments`` has ``counts`` N_c of shape (C,), the sums S_c of z (``sums``) of shape (C, d), and the sums P_c of
z z^T (``products``) of shape (C, d (d + 1) / 2): the entries on and above the diagonal, row by row. All is float64,
since a covariance is a small difference of these sums. Those of several clients add up to those of all their samples.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.params import Tree

_ROUND_OFF = 16 * torch.finfo(torch.float64).eps
"""Of the mean of ||z||^2: an eigenvalue of a covariance that is not larger may be 0 and no more than round-off."""


def class_moments(features: Tensor, labels: Tensor, classes: int) -> Tree:
    """The moments of labelled features.

    Args:
        features: z, shape (n, d).
        labels: their classes, shape (n,).
        classes: C.
    """
    z, members = features.double(), F.one_hot(labels, classes).double()
    rows, columns = _upper(z.shape[1], z)
    products = z.new_zeros(classes, len(rows))
    for label in sorted(set(labels.tolist())):
        own = z[labels == label]
        products[label] = (own.T @ own)[rows, columns]
    return {"counts": members.sum(0), "sums": members.T @ z, "products": products}


def gaussian_of(moments: Tree, label: int) -> tuple[Tensor, Tensor]:
    """mu_c, shape (d,), and a symmetric root R of Sigma_c = R R, shape (d, d).

        mu_c = S_c / N_c,    Sigma_c = (P_c - N_c mu_c mu_c^T) / (N_c - 1)

    Sigma_c is 0 for a class of one sample. The symmetric root hardly moves with the last bits of Sigma_c, whichever
    eigenvectors are found.

    Args:
        moments: of all samples.
        label: c, a class that has samples.
    """
    count, mean = moments["counts"][label], moments["sums"][label] / moments["counts"][label]
    rows, columns = _upper(len(mean), mean)
    products = mean.new_zeros(len(mean), len(mean))
    products[rows, columns] = moments["products"][label]
    products[columns, rows] = moments["products"][label]
    freedom = (count - 1).clamp(min=1)
    values, vectors = torch.linalg.eigh((products - count * torch.outer(mean, mean)) / freedom)
    certain = (values > _ROUND_OFF * products.trace() / freedom) & (count > 1)
    return mean, (vectors * torch.where(certain, values, 0).sqrt()) @ vectors.T


def virtual_features(moments: Tree, number: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Features drawn from the Gaussian of each class that has samples, shape (m, d), and their classes, shape (m,).

    Args:
        moments: of all samples.
        number: M_c, how many of a class.
        generator: draws standard normal numbers, class by class.
    """
    drawn, labels = [], (moments["counts"] > 0).nonzero()[:, 0]
    for label in labels.tolist():
        mean, root = gaussian_of(moments, label)
        noise = torch.from_numpy(generator.standard_normal((number, len(mean)))).to(mean)
        drawn.append(mean + noise @ root)
    return torch.cat(drawn), labels.repeat_interleave(number)


def _upper(width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries on and above the diagonal, row by row."""
    rows, columns = torch.triu_indices(width, width, device=like.device)
    return rows, columns
