"""Trees of tensors as flat buffers, so that a step is a few operations on long vectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree, from_leaves, leaves

# MKL picks its kernel, and so the last bit of a product, by the alignment of its operands: every view of a
# flat buffer starts where a freshly allocated tensor would.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Layout:
    """The layout of a tree of tensors of one type in a flat buffer.

    Attributes:
        paths: leaf paths, in the order of the tree.
        shapes: leaf shapes.
        offsets: first element of each leaf, aligned like a fresh allocation. Updated leaves come first.
        moving: number of elements that steps update, with padding.
        size: number of elements of the buffer, with padding.
        dtype: the leaves' common type.
    """

    paths: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    moving: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tree: Mapping[str, Any], moved: Collection[str] | None = None) -> Layout:
        """Returns the layout of a tree of tensors.

        Args:
            tree: the tree.
            moved: the paths that steps update; None for all.

        Raises:
            TypeError: when leaves differ in type or are not tensors.
        """
        found = dict(leaves(tree))
        numbers = [path for path, leaf in found.items() if not isinstance(leaf, Tensor)]
        if numbers:
            raise TypeError(f"a trained tree holds tensors only, {numbers} are numbers")
        forms = tuple((path, leaf.shape, leaf.dtype) for path, leaf in found.items())
        return _layout(forms, None if moved is None else frozenset(moved))

    @cached_property
    def places(self) -> dict[str, slice]:
        """Returns the slice of each leaf, with its padding, by path."""
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        rows = zip(self.paths, self.shapes, self.offsets, strict=True)
        return {path: slice(start, start + -(-shape.numel() // step) * step) for path, shape, start in rows}

    @cached_property
    def moved(self) -> list[str]:
        """Returns the paths of the leaves that steps update."""
        return [path for path, offset in zip(self.paths, self.offsets, strict=True) if offset < self.moving]

    def leaves(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of a buffer (of ``size`` or ``moving`` elements) with the leaves' shapes, by path."""
        return {
            path: flat[offset : offset + shape.numel()].view(shape)
            for path, shape, offset in zip(self.paths, self.shapes, self.offsets, strict=True)
            if offset < len(flat) or not shape.numel()
        }

    def views(self, flat: Tensor) -> Tree:
        """Returns the tree whose leaves are views of a buffer of ``size`` elements."""
        return from_leaves(self.leaves(flat))

    def zeros(self, device: torch.device, size: int | None = None) -> Tensor:
        """Returns a buffer of zeros, by default of ``size`` elements."""
        return _zeros(self.size if size is None else size, self.dtype, device)

    def pack(self, tree: Mapping[str, Any], device: torch.device, size: int | None = None) -> Tensor:
        """Returns a new buffer with a copy of a tree, which may have further leaves; see :meth:`zeros`."""
        flat, found = self.zeros(device, size), dict(leaves(tree))
        for path, view in self.leaves(flat).items():
            view.copy_(found[path])
        return flat


@lru_cache
def _layout(forms: tuple[tuple[str, torch.Size, torch.dtype], ...], moved: frozenset[str] | None) -> Layout:
    """Returns the layout for given paths, shapes and types; cached, so that equal trees share it."""
    types = {dtype for _, _, dtype in forms}
    if len(types) != 1:
        raise TypeError(f"a trained tree needs leaves of one type, got {sorted(map(str, types))}")
    dtype = types.pop()
    step = ALIGNMENT_BYTES // dtype.itemsize
    offsets, position, moving = {}, 0, 0
    for path, shape, _ in sorted(forms, key=lambda form: moved is not None and form[0] not in moved):
        offsets[path] = position
        position += -(-shape.numel() // step) * step
        moving = position if moved is None or path in moved else moving
    paths, shapes = tuple(path for path, _, _ in forms), tuple(shape for _, shape, _ in forms)
    return Layout(paths, shapes, tuple(offsets[path] for path in paths), moving, position, dtype)


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a vector of zeros, aligned like a fresh tensor.

    On CPUs it is allocated by malloc. PyTorch uses posix_memalign, which in glibc before 2.38 never reuses a freed
    block of exactly the requested size: every vector would be in new pages.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    room = np.zeros(size * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(room[start : start + size * dtype.itemsize]).view(dtype)
