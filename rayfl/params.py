"""Trees of tensors: how models, server state and client state are held.

A tree is a nested ``dict`` with string keys whose leaves are tensors or plain numbers. A model is the
flat tree ``{parameter name: tensor}``; a method nests models as it likes (``{"federated": ..., "local": ...}``).
A leaf's path is its keys joined by ``/``, which therefore cannot be part of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Tree = dict[str, Any]
Number = int | float

TINY = 1e-12
"""The smallest product of squared norms that a cosine is divided by."""

_CACHED_NUMBERS = 1 << 15
"""Numbers of float64 that a processor's cache holds beside others."""

_WORD = np.dtype([("bfloat16", np.int16)])

_INNER = (dict, Mapping)
"""What has leaves. A dict is found out at once, another mapping slowly, so tensors are asked about before it."""


def leaves(tree: Mapping[str, Any], prefix: str = "", with_empty: bool = False) -> list[tuple[str, Any]]:
    """Returns (path, leaf) in insertion order; ``with_empty`` dicts without leaves, too."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if not isinstance(value, Tensor) and isinstance(value, _INNER) and (value or not with_empty):
            found += leaves(value, f"{prefix}{key}/", with_empty)
        else:
            found.append((f"{prefix}{key}", value))
    return found


def from_leaves(pairs: Mapping[str, Any]) -> Tree:
    """The inverse of :func:`leaves` (for trees without empty dicts, which have no leaves)."""
    tree: Tree = {}
    for path, value in pairs.items():
        *parents, key = path.split("/")
        node = reduce(lambda inner, name: inner.setdefault(name, {}), parents, tree)
        node[key] = value
    return tree


def map_leaves(function: Callable[..., Any], tree: Mapping[str, Any], *others: Mapping[str, Any]) -> Tree:
    """Applies ``function`` to corresponding leaves of trees of one structure."""
    if not others:
        return {
            key: map_leaves(function, value)
            if not isinstance(value, Tensor) and isinstance(value, _INNER)
            else function(value)
            for key, value in tree.items()
        }
    return {
        key: map_leaves(function, value, *(other[key] for other in others))
        if not isinstance(value, Tensor) and isinstance(value, _INNER)
        else function(value, *(other[key] for other in others))
        for key, value in tree.items()
    }


def own_dicts(tree: Mapping[str, Any]) -> Tree:
    """The same leaves in dicts of their own: what is assigned in one tree is not assigned in the other."""
    return {
        key: own_dicts(value) if not isinstance(value, Tensor) and isinstance(value, _INNER) else value
        for key, value in tree.items()
    }


def copy(tree: Mapping[str, Any]) -> Tree:
    """A tree whose tensors share no memory with ``tree``."""
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def copies(originals: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, each in memory of its own; on accelerators in few launches for all.

    Args:
        originals: tensors of one device, without gradients.
    """
    if not originals or originals[0].device.type == "cpu":
        return [tensor.clone() for tensor in originals]
    found = list(map(torch.empty_like, originals))
    alike: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(originals):
        alike.setdefault(tensor.dtype, []).append(place)
    for places in alike.values():
        torch._foreach_copy_([found[i] for i in places], [originals[i] for i in places])
    return found


def zeros_like(tree: Mapping[str, Any]) -> Tree:
    """Zeros of the same shapes and types."""
    return map_leaves(torch.zeros_like, tree)


def interpolate(start: Mapping[str, Any], end: Mapping[str, Any], coefficient: float | Tensor) -> Tree:
    """``(1 - coefficient) * start + coefficient * end``; exact at 0 and at 1."""
    return map_leaves(lambda a, b: torch.lerp(a, b, _weight(coefficient, a)), start, end)


def add_scaled(tree: Mapping[str, Any], other: Mapping[str, Any], scale: float) -> Tree:
    """``tree + scale * other``."""
    return map_leaves(lambda a, b: torch.add(a, b, alpha=scale), tree, other)


def subtract(tree: Mapping[str, Any], other: Mapping[str, Any]) -> Tree:
    """``tree - other``."""
    return map_leaves(torch.sub, tree, other)


def weighted_sum(trees: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Tree:
    """``sum_j weights[j] * trees[j]``, accumulated in float64, in the leaves' own types.

    A tree with weight 0 is left out, one alone with weight 1 is returned to the bit.
    """
    taken = [(tree, weight) for tree, weight in zip(trees, weights, strict=True) if weight]

    def add(*parts: Tensor) -> Tensor:
        total = torch.zeros_like(parts[0], dtype=torch.float64)
        for part, (_, weight) in zip(parts, taken, strict=True):
            total = torch.add(total, part, alpha=weight)
        return total.to(parts[0].dtype)

    return map_leaves(add, *(tree for tree, _ in taken))


def weighted_sums(trees: Sequence[Mapping[str, Any]], weights: Tensor) -> list[Tree]:
    """Several weighted sums of the same trees: ``sum_j weights[i, j] * trees[j]`` for each i.

    As :func:`weighted_sum` of each row, in one pass over the trees for many rows.

    Args:
        trees: J trees of one structure.
        weights: float64 of shape (I, J).

    Returns:
        I trees.
    """
    taken = weights.any(0).nonzero()[:, 0].tolist()

    def add(*parts: Tensor) -> list[Tensor]:
        first, sums = parts[0], list[Tensor]()
        # Few rows at a time, so that their sums stay in a processor's cache while all trees are added.
        count = max(_CACHED_NUMBERS // max(first.numel(), 1), 1)
        for begin in range(0, len(weights), count):
            rows = weights[begin : begin + count].to(first.device)
            total = torch.zeros(len(rows), *first.shape, dtype=torch.float64, device=first.device)
            shares = rows.view(*rows.shape, *[1] * first.dim())
            for j in taken:
                total.addcmul_(shares[:, j], parts[j].to(torch.float64))
            sums += [one.to(first.dtype, copy=True) for one in total]
        return sums

    sums = map_leaves(add, *trees)
    return [map_leaves(lambda of_all, i=i: of_all[i], sums) for i in range(len(weights))]


def inner_product(tree: Mapping[str, Any], other: Mapping[str, Any]) -> Tensor:
    """Euclidean inner product over all leaves; a scalar tensor."""
    return _total(map_leaves(lambda a, b: torch.dot(a.flatten(), b.flatten()), tree, other))


def squared_norm(tree: Mapping[str, Any]) -> Tensor:
    """Squared Euclidean norm over all leaves; a scalar tensor."""
    return inner_product(tree, tree)


def squared_distance(tree: Mapping[str, Any], other: Mapping[str, Any]) -> Tensor:
    """Squared Euclidean distance over all leaves; a scalar tensor."""
    # One pass forward and one backward; writing it with subtractions and products takes five.
    return _total(map_leaves(lambda a, b: F.mse_loss(a, b, reduction="sum"), tree, other))


def squared_cosine(tree: Mapping[str, Any], other: Mapping[str, Any]) -> Tensor:
    """cos^2 of the angle between two trees as one vector each; a scalar tensor, 0 where one of them is zero."""
    product, norms = inner_product(tree, other), squared_norm(tree) * squared_norm(other)
    return product * product / norms.clamp_min(TINY)


def _total(tree: Mapping[str, Any]) -> Tensor:
    return torch.stack([value for _, value in leaves(tree)]).sum()


def tensors(tree: Mapping[str, Any]) -> list[Tensor]:
    """The tensor leaves, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def stacks(trees: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields each leaf's path, and the leaves of all trees there as float64 of shape (n, *leaf).

    Args:
        trees: n trees of one structure.
    """
    columns = [dict(leaves(tree)) for tree in trees]
    for path in columns[0]:
        yield path, torch.stack([column[path].double() for column in columns])


def num_bytes(tree: Mapping[str, Any]) -> int:
    """Bytes of all tensor leaves: what a transfer of the tree costs (plain numbers count 8)."""
    return sum(leaf.nbytes if isinstance(leaf, Tensor) else 8 for _, leaf in leaves(tree))


def to_numpy(tree: Mapping[str, Any], made: dict[int, np.ndarray] | None = None) -> Tree:
    """Tensors as NumPy arrays, which Ray moves without copying, only for :func:`from_numpy` to read; numbers stay.

    Args:
        tree: tensors and numbers. A tensor in several places is one array, which is moved once.
        made: the arrays of tensors converted before, by the ``id`` of the tensor, which has to live on. They are taken
            again, and new ones are added.
    """
    known = {} if made is None else made

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = leaf.detach().cpu().numpy() if leaf.dtype is not torch.bfloat16 else _as_words(leaf)
        return known[id(leaf)]

    return map_leaves(convert, tree)


def from_numpy(
    tree: Mapping[str, Any], device: torch.device | str = "cpu", made: dict[int, Tensor] | None = None
) -> Tree:
    """Copies arrays into tensors: arrays out of the object store are read-only views of shared memory.

    Args:
        tree: arrays and numbers.
        device: where the tensors are wanted.
        made: the tensors of arrays converted before, by the ``id`` of the array, which has to live on. They are taken
            again, and new ones are added.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        if leaf.dtype.kind == "V":
            return _from_words(leaf, device, made)
        if made is None:
            return torch.tensor(leaf, device=device)
        if id(leaf) not in made:
            made[id(leaf)] = torch.tensor(leaf, device=device)
        return made[id(leaf)]

    return map_leaves(convert, tree)


def _as_words(leaf: Tensor) -> np.ndarray:
    """A tensor of bfloat16, a type that NumPy does not have, as records of its bits."""
    return leaf.detach().cpu().view(torch.int16).numpy().view(_WORD)


def _from_words(array: np.ndarray, device: torch.device | str, made: dict[int, Tensor] | None) -> Tensor:
    """The inverse of :func:`_as_words`, on a device."""
    known = {} if made is None else made
    if id(array) not in known:
        known[id(array)] = torch.tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return known[id(array)]


def _weight(coefficient: float | Tensor, like: Tensor) -> float | Tensor:
    return coefficient.to(like.dtype) if isinstance(coefficient, Tensor) else coefficient
