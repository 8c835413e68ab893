"""User-level differential privacy of a mean: bounded contributions, and noise on their sum, or on each of them.

A contribution counts as its difference from what the client received. The estimate divides by the expected number of
contributions, not by how many there are, so that one more client changes the sum by its own contribution alone.

Source: McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018, Algorithm
1 with flat clipping and the estimator of the fixed denominator. The norm that follows a quantile is that of Andrew,
Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS 2021, Algorithm 1 with the
geometric update.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.contributions import Weighted
from rayfl.aggregation.tree_noise import Draw
from rayfl.params import Tree, from_leaves, leaves


def reference_of(tree: Mapping[str, Any], broadcast: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what a client's message is a change of, by the paths of the message's leaves.

    It is what the client received under the same names: in the whole broadcast, or in one of its entries (``model``).

    Args:
        tree: the message.
        broadcast: what all clients received.

    Raises:
        ValueError: a leaf of the message was not received.
    """
    wanted = dict(leaves(tree))
    missing: list[str] = []
    for place in (broadcast, *(value for value in broadcast.values() if isinstance(value, Mapping))):
        received = dict(leaves(place))
        lacking = [path for path, leaf in wanted.items() if not _alike(leaf, received.get(path))]
        if not lacking:
            return {path: received[path] for path in wanted}
        if not missing or len(lacking) < len(missing):
            missing = lacking
    raise ValueError(f"sends {missing[0]!r}, which is no change of a tensor that all clients received")


def limited(contributions: Sequence[Weighted], received: Mapping[str, Tensor], bound: float) -> list[Weighted]:
    """Returns contributions to a mean, clipped; they say whether they were within the bound.

    Args:
        contributions: messages of the same names.
        received: by path, what they are changes of.
        bound: C, the largest Euclidean norm of a change.
    """
    trees, within = clipped([one.tree for one in contributions], received, bound)
    made = zip(contributions, trees, within.unbind(), strict=True)
    return [replace(one, tree=tree, within=short) for one, tree, short in made]


def clipped(
    trees: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], bound: float
) -> tuple[list[Tree], Tensor]:
    """Returns ``received + change * min(1, bound / ||change||)``, with one norm over all leaves; in new memory.

    The second result says whose norm was within the bound: bool of shape (N,), where the leaves are.

    Args:
        trees: messages of N clients, of the same names.
        received: by path, what they are changes of.
        bound: C, the largest Euclidean norm of a change.
    """
    changes = {path: rows - received[path].double() for path, rows in _rows(trees).items()}
    norms = torch.stack([change.square().reshape(len(trees), -1).sum(1) for change in changes.values()]).sum(0).sqrt()
    factors = (bound / norms).clamp(max=1)  # a change of zero has the factor min(inf, 1)
    moved = {
        path: (received[path].double() + factors.view(-1, *[1] * received[path].dim()) * change).to(received[path])
        for path, change in changes.items()
    }
    return _trees(moved), norms <= bound


def noised(trees: Sequence[Mapping[str, Any]], deviation: float, noise: Tensor) -> list[Tree]:
    """Returns messages with noise of their own on each element, in new memory.

    Args:
        trees: clipped messages of N clients, of the same names.
        deviation: standard deviation of the noise.
        noise: standard normal numbers of shape (N, P), for the leaves one after another.
    """
    kinds = {path: leaf.dtype for path, leaf in leaves(trees[0])}
    rows = _rows(trees)
    parts = torch.split(noise, [len(row[0].reshape(-1)) for row in rows.values()], dim=1)
    made = zip(rows.items(), parts, strict=True)
    return _trees({path: (row + deviation * part.view_as(row)).to(kinds[path]) for (path, row), part in made})


def _rows(trees: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the leaves of trees by path, float64 of shape (N, *)."""
    found = [dict(leaves(tree)) for tree in trees]
    return {path: torch.stack([one[path] for one in found]).double() for path in found[0]}


def _trees(rows: Mapping[str, Tensor]) -> list[Tree]:
    parts = {path: row.unbind() for path, row in rows.items()}
    return [from_leaves(dict(zip(parts, one, strict=True))) for one in zip(*parts.values(), strict=True)]


def released(
    mean: Mapping[str, Any],
    received: Mapping[str, Tensor],
    count: int,
    expected: int,
    deviation: float,
    draw: Draw,
) -> Tree:
    """Returns the private estimate of a mean: ``received + (sum of the changes + noise) / expected``.

    Args:
        mean: of ``count`` contributions that are clipped.
        received: by path, what they are changes of.
        count: contributions.
        expected: m, how many there are expected to be.
        deviation: of independent noise on each element of the sum; of a tree's noise, that of one node.
        draw: gives the noise of each leaf.
    """
    made: Tree = {}
    for path, leaf in leaves(mean):
        start = received[path].double()
        noise = torch.as_tensor(draw(path, tuple(leaf.shape)), dtype=torch.float64)
        made[path] = (start + ((leaf.double() - start) * count + deviation * noise) / expected).to(leaf.dtype)
    return from_leaves(made)


def following(
    bound: float,
    within: int,
    count: int,
    expected: int,
    *,
    quantile: float,
    rate: float,
    deviation: float,
    generator: np.random.Generator,
) -> float:
    """Returns the bound of the next round, ``bound * exp(-rate * (share - quantile))``.

    ``share`` is the private estimate of the share of clients within the bound. Each counts as +1/2 or -1/2, so that one
    client more changes the sum by 1/2; the denominator is fixed, so ``share`` may leave [0, 1].

    Args:
        bound: C of this round.
        within: how many contributions were within it.
        count: contributions.
        expected: m, how many there are expected to be.
        quantile: gamma, the share that is wanted.
        rate: eta_C.
        deviation: sigma_b, standard deviation of the normal noise on the sum of the halves.
        generator: of the noise.

    Raises:
        OverflowError: the next bound is too large or too small for a number.
    """
    share = (within - count / 2 + deviation * generator.standard_normal()) / expected + 0.5
    found = bound * math.exp(-rate * (share - quantile))
    if not sys.float_info.min <= found < math.inf:
        raise OverflowError(f"a bound of {found}")
    return found


def _alike(leaf: Any, received: Any) -> bool:
    return isinstance(leaf, Tensor) and isinstance(received, Tensor) and leaf.shape == received.shape
