"""Gaussian mixtures of features by class: how clients fit them, and how the server draws from them.

A tree ``mixtures`` has ``labels`` of its classes, ``counts`` N_c of their samples and ``components``, how many
Gaussians each class has, all of shape (c,); and of all Gaussians below each other ``weights`` of shape (k,), ``means``
of shape (k, d), and ``covariances``: variances of shape (k, 1) or (k, d), or of shape (k, d (d + 1) / 2) the entries on
and above the diagonal, row by row.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree

Covariance = Literal["spherical", "diag", "full"]


def fitted(
    features: Tensor,
    labels: Tensor,
    components: int,
    covariance: Covariance,
    least: int,
    tolerance: float,
    iterations: int,
    seed: int,
    dtype: torch.dtype,
) -> Tree:
    """The mixtures of labelled features, by expectation and maximisation from k-means (scikit-learn).

    A class of N samples has at most N - 1 components, and one at least.

    Args:
        features: z, shape (n, d).
        labels: their classes, shape (n,).
        components: K, of a class with enough samples.
        covariance: scikit-learn's kinds, one variance for each Gaussian, one for each feature, or all entries.
        least: samples from which on a class has a mixture.
        tolerance: the gain in mean log-likelihood below which a fit ends.
        iterations: after which it ends in any case.
        seed: of k-means.
        dtype: of weights, means and covariances.
    """
    # a second of imports that only this needs
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    z, classes = features.double().cpu().numpy(), labels.cpu().numpy()
    width = z.shape[1]
    entries = {"spherical": 1, "diag": width, "full": width * (width + 1) // 2}[covariance]
    found, counts = list[tuple[int, GaussianMixture]](), list[int]()
    # sums by several threads depend on their number
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for label in np.unique(classes).tolist():
            own = z[classes == label]
            if len(own) < least:
                continue
            mixture = GaussianMixture(
                n_components=max(min(components, len(own) - 1), 1),
                covariance_type=covariance,
                tol=tolerance,
                max_iter=iterations,
                random_state=seed,
            )
            # scikit-learn takes no single sample; two alike have the same mean and no variance either
            found.append((label, mixture.fit(own if len(own) > 1 else own.repeat(2, 0))))
            counts.append(len(own))
    rows, columns = np.triu_indices(width)

    def flat(values: np.ndarray) -> np.ndarray:
        return values[:, rows, columns] if covariance == "full" else values.reshape(len(values), -1)

    def together(parts: list[np.ndarray], shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(shape), *parts])).to(dtype)

    return {
        "labels": torch.tensor([label for label, _ in found], dtype=torch.int32),
        "counts": torch.tensor(counts, dtype=torch.int32),
        "components": torch.tensor([len(one.weights_) for _, one in found], dtype=torch.int32),
        "weights": together([one.weights_ for _, one in found], (0,)),
        "means": together([one.means_ for _, one in found], (0, width)),
        "covariances": together([flat(one.covariances_) for _, one in found], (0, entries)),
    }


def drawn(mixtures: Tree, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """As many features of each class as it had samples, float64 of shape (n, d), and their classes, shape (n,).

    Args:
        mixtures: of one client.
        generator: draws how many features each Gaussian gives, then these, class by class.
    """
    means, covariances = mixtures["means"].double(), mixtures["covariances"].double()
    features, labels, first = [means.new_zeros(0, means.shape[1])], list[int](), 0
    sizes = zip(*(mixtures[name].tolist() for name in ("labels", "counts", "components")), strict=True)
    for label, count, components in sizes:
        weights = mixtures["weights"][first : first + components].double().cpu().numpy()
        times = generator.multinomial(count, weights / weights.sum())
        for number, often in enumerate(times.tolist(), first):
            noise = torch.from_numpy(generator.standard_normal((often, means.shape[1]))).to(means)
            features.append(means[number] + spread(noise, covariances[number]))
        labels += [label] * count
        first += components
    return torch.cat(features), torch.tensor(labels, dtype=torch.int64, device=means.device)


def spread(noise: Tensor, covariance: Tensor) -> Tensor:
    """Standard normal numbers of shape (n, d) with a covariance, of which one row of ``covariances`` is given.

    Of all entries the symmetric root is taken, with eigenvalues that rounding made negative as 0.
    """
    width = noise.shape[1]
    if len(covariance) in (1, width):
        return noise * covariance.clamp(min=0).sqrt()
    rows, columns = torch.triu_indices(width, width, device=noise.device)
    whole = noise.new_zeros(width, width)
    whole[rows, columns] = covariance
    whole[columns, rows] = covariance
    values, vectors = torch.linalg.eigh(whole)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return noise @ root
