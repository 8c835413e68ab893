"""Who has wrong labels, or which labels are wrong, by losses; and how far such clients' models are from others'."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree, leaves


def normalized_losses(losses: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Losses on the scale of each class, from 0 for the client with the lowest one to 1, float64 of shape (K, C).

    A client without samples of a class has the lowest loss of those that have some. A class in which no two clients
    differ is 0 for all.

    Args:
        losses: l_kc, the mean loss of client k on its samples of class c, float64 of shape (K, C).
        present: whether client k has any, bool of shape (K, C).
    """
    lowest = np.where(present, losses, np.inf).min(0)
    above = np.where(present, losses - np.where(np.isfinite(lowest), lowest, 0), 0)
    widest = above.max(0)
    found: np.ndarray = above / np.where(widest > 0, widest, 1)
    return found


def in_higher_component(features: np.ndarray, fits: int = 1) -> np.ndarray:
    """Whether each row is in the component of higher means of a mixture of two Gaussians, bool of shape (n,).

    The mixture (full covariances) is fitted several times, from the seeds 0, 1, ..; the set of rows that most fits find
    is taken, of several such sets that of the lowest seed. Where all rows are alike, none is.

    Args:
        features: shape (n, d).
        fits: how many times.
    """
    if len(features) < 2 or (features == features[0]).all():
        return np.zeros(len(features), dtype=bool)
    # a second of imports that only this needs
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    votes: Counter[tuple[bool, ...]] = Counter()
    # sums by several threads depend on their number; a fit that is not through has a vote like the others
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for seed in range(fits):
            mixture = GaussianMixture(n_components=2, random_state=seed).fit(features)
            higher = int(mixture.means_.sum(1).argmax())
            votes[tuple((mixture.predict(features) == higher).tolist())] += 1
    return np.array(votes.most_common(1)[0][0], dtype=bool)


def relative_distances(models: Mapping[int, Tree], noisy: Tensor) -> dict[int, float]:
    """D_k by client: how far the model of a noisy client is from the nearest one of a clean client, of at most 1.

    The distance of two models is the sum over tensors of the norms of their differences, in float64. All are divided by
    the largest. D_k is 0 for clean clients, and for all where no client is clean.

    Args:
        models: by client.
        noisy: bool, an entry for each client that there is.
    """
    clean = [model for client, model in models.items() if not noisy[client]]
    distances = {
        client: min((_distance(model, other) for other in clean), default=0.0) if noisy[client] else 0.0
        for client, model in models.items()
    }
    largest = max(distances.values())
    return {client: distance / largest if largest else 0.0 for client, distance in distances.items()}


def _distance(one: Tree, other: Tree) -> float:
    there = dict(leaves(other))
    norms = [
        (leaf.double() - there[path].double()).norm() for path, leaf in leaves(one) if torch.is_floating_point(leaf)
    ]
    return float(sum(norms))
