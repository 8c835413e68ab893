"""How each client last changed the model, and how far these updates are apart, for strategies that go by them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import scipy
import torch
from torch import Tensor

from rayfl.params import Tree, leaves

Metric = Literal["arccos", "l2", "l1"]
"""How far two updates are apart: the angle between them, the Euclidean distance, the sum of absolute differences."""

_NAMES: Mapping[Metric, str] = {"arccos": "cosine", "l2": "euclidean", "l1": "cityblock"}
_UPDATES, _DISTANCES = "updates", "distances"
_BLOCK = 1 << 23
"""Numbers in float64 that are compared at a time: 64 MiB."""


def changes_of(
    messages: Mapping[int, Tree], received: Mapping[str, Tensor], buffers: Collection[str]
) -> dict[int, Tensor]:
    """Returns how each client has changed the parameters, by client, (P,).

    Args:
        messages: as the server receives them, of one structure.
        received: by path, what they are changes of.
        buffers: names of tensors that are no parameters.
    """
    paths = sorted(path for path in received if path.rpartition("/")[2] not in buffers)
    sent = {client: dict(leaves(message)) for client, message in messages.items()}
    return {
        client: torch.cat([(tensors[path] - received[path]).flatten() for path in paths])
        for client, tensors in sent.items()
    }


def heard(own: Tree) -> np.ndarray:
    """Returns the clients whose update is known, ascending, int64."""
    return np.array(sorted(map(int, own.get(_UPDATES, {}))), np.int64)


def distances(own: Tree, metric: Metric, clients: int) -> np.ndarray:
    """Returns how far the last updates of all clients are apart, (K, K), float64.

    The update of a client that was never heard of is zero. Zero is at a right angle to everything but zero.

    Args:
        own: what :func:`with_updates` has returned.
        metric: what is meant by far.
        clients: K.
    """
    kept = own.get(_DISTANCES, {}).get(metric)
    if kept is not None:
        return kept.numpy()  # type: ignore[no-any-return]
    vectors = _vectors(own)  # of a fork that had another metric
    return _renewed(np.zeros((clients, clients)), vectors, vectors, metric)


def with_updates(own: Tree, updates: Mapping[int, Tensor], metric: Metric, clients: int) -> Tree:
    """Returns what is remembered once some clients have sent an update; the tree before stays as it is.

    Args:
        own: what was remembered.
        updates: of clients that have taken part, (P,) each.
        metric: in which distances are kept, so that a round computes those of its own clients alone.
        clients: K.
    """
    if not updates:
        return own
    size = next(iter(updates.values())).numel()
    before = _vectors(own)
    if any(vector.numel() != size for vector in before.values()):  # of a fork whose clients send other tensors
        own, before = {}, {}
    vectors = {**before, **{client: update.detach().float() for client, update in updates.items()}}
    found = _renewed(distances(own, metric, clients).copy(), vectors, updates, metric)
    kept = {str(client): vectors[client] for client in sorted(vectors)}
    return {_UPDATES: kept, _DISTANCES: {metric: torch.from_numpy(found)}}


def _vectors(own: Tree) -> dict[int, Tensor]:
    return {int(client): vector for client, vector in own.get(_UPDATES, {}).items()}


def _renewed(matrix: np.ndarray, vectors: Mapping[int, Tensor], changed: Collection[int], metric: Metric) -> np.ndarray:
    """Computes the rows and columns of some clients again, in place; returns the matrix.

    SciPy sums one pair after the other, so that bits depend neither on threads nor on which rows are computed.
    """
    if not changed:
        return matrix
    places, everybody = list(changed), list(vectors)
    width = max(_BLOCK // max(next(iter(vectors.values())).numel(), 1), 1)
    for first in range(0, len(places), width):
        some = places[first : first + width]
        rows = _stacked(vectors, some)
        matrix[some] = _apart(rows, np.zeros_like(rows[:1]), metric)
        for start in range(0, len(everybody), width):
            others = everybody[start : start + width]
            matrix[np.ix_(some, others)] = _apart(rows, _stacked(vectors, others), metric)
    matrix[places, places] = 0.0
    matrix[:, places] = matrix[places].T
    return matrix


def _stacked(vectors: Mapping[int, Tensor], clients: Sequence[int]) -> np.ndarray:
    return torch.stack([vectors[client] for client in clients]).double().numpy()


def _apart(ones: np.ndarray, others: np.ndarray, metric: Metric) -> np.ndarray:
    """Returns how far vectors (m, P) are from others (n, P), (m, n)."""
    if metric != "arccos":
        return scipy.spatial.distance.cdist(ones, others, _NAMES[metric])  # type: ignore[no-any-return]
    mine, theirs = np.flatnonzero(ones.any(axis=1)), np.flatnonzero(others.any(axis=1))
    found = np.zeros((len(ones), len(others)))
    found[mine], found[:, theirs] = np.pi / 2, np.pi / 2
    cosines = 1 - scipy.spatial.distance.cdist(ones[mine], others[theirs], _NAMES[metric])
    found[np.ix_(mine, theirs)] = np.arccos(np.clip(cosines, -1, 1))
    return found
