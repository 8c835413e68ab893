"""How each client last changed the model, and how far these updates are apart, for strategies that go by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from scipy.spatial.distance import cdist
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


def _renewed(matrix: np.ndarray, vectors: Mapping[int, Tensor], changed: Iterable[int], metric: Metric) -> np.ndarray:
    """Computes the rows and columns of some clients anew, in place; returns the matrix.

    SciPy sums one pair after the other, so that bits depend neither on threads nor on which rows are computed.
    """
    others = list(vectors)
    for client in changed:
        own = vectors[client].double().numpy()[None]
        row = np.full(len(matrix), _from(own, np.zeros_like(own), metric)[0])
        width = max(_BLOCK // max(own.size, 1), 1)
        for first in range(0, len(others), width):
            block = others[first : first + width]
            row[block] = _from(own, torch.stack([vectors[other] for other in block]).double().numpy(), metric)
        row[client] = 0.0
        matrix[client], matrix[:, client] = row, row
    return matrix


def _from(one: np.ndarray, others: np.ndarray, metric: Metric) -> np.ndarray:
    """Returns how far one vector (1, P) is from others (n, P), (n,)."""
    if metric != "arccos":
        return cdist(one, others, _NAMES[metric])[0]  # type: ignore[no-any-return]
    null, nulls = not one.any(), ~others.any(axis=1)
    if null:
        return np.where(nulls, 0.0, np.pi / 2)
    found = np.full(len(others), np.pi / 2)
    if not nulls.all():
        found[~nulls] = np.arccos(np.clip(1 - cdist(one, others[~nulls], _NAMES[metric])[0], -1, 1))
    return found
