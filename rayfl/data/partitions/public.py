"""Samples that belong to no client: taken out of the train parts; only the server may see their labels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rayfl.errors import DataError
from rayfl.randomness import RandomStreams


def draw_public(train_sizes: np.ndarray, count: int, streams: RandomStreams) -> list[np.ndarray]:
    """Draws ``count`` samples uniformly from all train parts together.

    Args:
        train_sizes: n_k before the draw, int64 of shape (K,).
        count: how many, at least 0.
        streams: the experiment's randomness; uses the stream ``public``.

    Returns:
        By client, the ascending positions within its train part that are taken.

    Raises:
        DataError: there are not enough samples, or a client would have none left.
    """
    total = int(train_sizes.sum())
    if count > total:
        raise DataError(f"holdout.public is {count}, but there are only {total} train samples; lower it")
    chosen = np.sort(streams.generator("public").choice(total, size=count, replace=False))
    starts = np.concatenate([[0], np.cumsum(train_sizes)])
    taken = [chosen[np.searchsorted(chosen, a) : np.searchsorted(chosen, b)] - a for a, b in pairwise(starts)]
    for client, positions in enumerate(taken):
        if len(positions) == train_sizes[client]:
            raise DataError(
                f"client {client} has only {train_sizes[client]} train samples, all of which holdout.public = {count} "
                "would take; lower it"
            )
    return taken
