"""Dynamic regularisation, kept as sums of displacements: what FedDyn's client and server do with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rayfl.engine.client import Client
from rayfl.params import Tree, add_scaled, from_leaves, leaves, subtract

STATE = "displacement"
"""Where a client's state keeps d_k."""


def anchor_of(client: Client, received: Tree) -> Tree:
    """Returns w - d_k, around which the client's quadratic term is; d_k is 0 at first.

    Args:
        client: who trains.
        received: the parameters of w that the client has.
    """
    return subtract(received, _displacement(client, received))


def keep_displacement(client: Client, received: Tree, end: Tree) -> None:
    """Adds what a client has moved in a round to its d_k.

    Args:
        client: who has trained.
        received: the parameters of w.
        end: those of theta_k.
    """
    client.state[STATE] = add_scaled(_displacement(client, received), subtract(end, received), 1)


def corrected(
    mean: Mapping[str, Any], received: Mapping[str, Any], displacement: Tree, share: float
) -> tuple[Tree, Tree]:
    """Returns the server's model mean(theta_k) + d and its d, the mean of all clients' d_k, after a round.

    Args:
        mean: the uniform mean of the cohort's theta_k, with their buffers, which stay as they are.
        received: w, the model that the cohort began with.
        displacement: d before the round, which names the parameters.
        share: |S|/K, the cohort's part of all clients.
    """
    trained, before = ({name: tree[name] for name in displacement} for tree in (mean, received))
    displacement = add_scaled(displacement, subtract(trained, before), share)
    return {**mean, **add_scaled(trained, displacement, 1)}, displacement


def _displacement(client: Client, received: Tree) -> Tree:
    """d_k of the parameters that the client has, 0 for those that it has for the first time."""
    kept = dict(leaves(client.state.get(STATE) or {}))
    return from_leaves({p: kept[p] if p in kept else torch.zeros_like(leaf) for p, leaf in leaves(received)})
