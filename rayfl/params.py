"""Trees of tensors: how models, server state and client state are held.

A tree is a nested ``dict`` with string keys whose leaves are tensors or plain numbers. A model is the
flat tree ``{parameter name: tensor}``; a method nests models as it likes (``{"federated": ..., "local": ...}``).
A leaf's path is its keys joined by ``/``, which therefore cannot be part of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Tree = dict[str, Any]
Number = int | float

# MKL picks its kernel, and so the last bit of a product, by the alignment of its operands: every view of a
# flat buffer starts where a freshly allocated tensor would.
ALIGNMENT_BYTES = 64


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) in insertion order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


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
    return {
        key: map_leaves(function, value, *(other[key] for other in others))
        if isinstance(value, Mapping)
        else function(value, *(other[key] for other in others))
        for key, value in tree.items()
    }


def copy(tree: Mapping[str, Any]) -> Tree:
    """A tree whose tensors share no memory with ``tree``."""
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


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


def _total(tree: Mapping[str, Any]) -> Tensor:
    return torch.stack([value for _, value in leaves(tree)]).sum()


def tensors(tree: Mapping[str, Any]) -> list[Tensor]:
    """The tensor leaves, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes(tree: Mapping[str, Any]) -> int:
    """Bytes of all tensor leaves: what a transfer of the tree costs (plain numbers count 8)."""
    return sum(leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 8 for _, leaf in leaves(tree))


def to_numpy(tree: Mapping[str, Any]) -> Tree:
    """Tensors as NumPy arrays, which Ray moves without copying; numbers stay."""
    return map_leaves(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf, tree)


def from_numpy(tree: Mapping[str, Any], device: torch.device | str = "cpu") -> Tree:
    """Copies arrays into tensors: arrays out of the object store are read-only views of shared memory."""

    def convert(leaf: Any) -> Any:
        return torch.tensor(leaf, device=device) if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(convert, tree)


def _weight(coefficient: float | Tensor, like: Tensor) -> float | Tensor:
    return coefficient.to(like.dtype) if isinstance(coefficient, Tensor) else coefficient


def _zeros(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A vector of zeros that starts where a fresh tensor would.

    On CPUs its memory is malloc's. PyTorch's comes from posix_memalign, for which glibc before 2.38 uses no freed block
    of just the size that is asked for: vectors of one size would always be in new pages.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    room = np.zeros(size * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(room[start : start + size * dtype.itemsize]).view(dtype)


@dataclass(frozen=True)
class Layout:
    """Where each leaf of a tree of equal-typed tensors lies in one flat buffer.

    Attributes:
        paths: leaf paths.
        shapes: leaf shapes.
        offsets: first element of each leaf; aligned as a fresh allocation is.
        size: elements of the buffer, padding included.
        dtype: the leaves' common type.
    """

    paths: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Layout:
        """The layout of a tree of tensors.

        Raises:
            TypeError: when leaves differ in type or are no tensors.
        """
        pairs = list(leaves(tree))
        numbers = [path for path, leaf in pairs if not isinstance(leaf, Tensor)]
        if numbers:
            raise TypeError(f"a trained tree holds tensors only, {numbers} are numbers")
        types = {leaf.dtype for _, leaf in pairs}
        if len(types) != 1:
            raise TypeError(f"a trained tree needs leaves of one type, got {sorted(map(str, types))}")
        dtype = types.pop()
        step = ALIGNMENT_BYTES // dtype.itemsize
        offsets, position = [], 0
        for _, leaf in pairs:
            offsets.append(position)
            position += -(-leaf.numel() // step) * step
        return cls(tuple(p for p, _ in pairs), tuple(leaf.shape for _, leaf in pairs), tuple(offsets), position, dtype)

    def views(self, flat: Tensor) -> Tree:
        """The tree whose leaves are views of ``flat`` (of ``size`` elements)."""
        return from_leaves(
            {
                path: flat[offset : offset + shape.numel()].view(shape)
                for path, shape, offset in zip(self.paths, self.shapes, self.offsets, strict=True)
            }
        )

    def padded(self, flat: Tensor) -> dict[str, Tensor]:
        """One-dimensional views of ``flat`` by path: each leaf with the padding behind it."""
        ends = (*self.offsets[1:], self.size)
        return {p: flat[start:end] for p, start, end in zip(self.paths, self.offsets, ends, strict=True)}

    def pack(self, tree: Mapping[str, Any], device: torch.device | str) -> Tensor:
        """A fresh flat buffer on ``device`` holding a copy of ``tree``."""
        flat = _zeros(self.size, self.dtype, device)
        for (_, view), (_, leaf) in zip(leaves(self.views(flat)), leaves(tree), strict=True):
            view.copy_(leaf)
        return flat
