"""Weights that are made of shared ones with a mask, ones of a client's own, and a weighted sum of those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Model, Task


def shared_names(task: Task, model: Model) -> list[str]:
    """The parameters below the head that have rows: those of which B is made."""
    return [name for name in task.network.body_names if model[name].ndim > 1]


def by_row(values: Tensor, leaf: Tensor) -> Tensor:
    """Values of a leaf's rows, in a shape that fits the leaf."""
    return values.view(-1, *[1] * (leaf.ndim - 1))


def based(shared: Tree, mask: Tree, adaptive: Tree) -> Tree:
    """B sigmoid(m) + A, by name."""
    found: Tree = map_leaves(lambda b, m, a: b * by_row(m.sigmoid(), b) + a, shared, mask, adaptive)
    return found


def transferred(attention: Tree | None, others: Tree) -> Tree:
    """sum_j alpha_j A_j, by name; empty without others."""
    if not attention:
        return {}
    found: Tree = map_leaves(lambda alpha, stack: torch.tensordot(alpha, stack, 1), attention, others)
    return found


def composed(shared: Tree, own: Mapping[str, Any]) -> Tree:
    """The model of a stage."""
    found = based(shared, own["mask"], own["adaptive"])
    if own.get("extra"):
        found = map_leaves(lambda leaf, more: leaf + more, found, own["extra"])
    return {**own["rest"], **found}


def merged(shared: Tree, sent: Tree, own: Tree | None) -> Tree:
    """The server's rows that somebody has sent, and one's own in the place of the others."""
    if own is None:
        return shared
    return map_leaves(lambda new, rows, old: torch.where(by_row(rows, new) > 0, new, old), shared, sent, own)
