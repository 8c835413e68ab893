"""From whose each sample is to the samples of each."""

from __future__ import annotations

import numpy as np


def places_by_owner(owner: np.ndarray, owners: int) -> list[np.ndarray]:
    """Returns where each owner's samples are, ascending, by one sort: there may be many owners of many samples.

    Args:
        owner: whose each sample is, integers in [0, ``owners``) of shape (N,).
        owners: how many there are; some may have nothing.
    """
    bounds = np.cumsum(np.bincount(owner, minlength=owners))[:-1]
    return np.split(np.argsort(owner, kind="stable"), bounds)
