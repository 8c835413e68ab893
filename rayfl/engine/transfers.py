"""Tensors of many trees from one device to another, in few transfers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, map_leaves, tensors

_MOST_BYTES = 256 << 20
"""Moved at a time, since what is moved together lies in memory once more."""


def moved_together(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[Tree]:
    """The trees with all tensors on a device; each of those that were elsewhere has memory of its own.

    Tensors of one type travel together. What is on the device already stays as it is.

    Args:
        trees: any trees; leaves that are no tensors stay.
        device: where to.
    """
    waiting: dict[tuple[torch.dtype, str], dict[int, Tensor]] = {}
    for tensor in (tensor for tree in trees for tensor in tensors(tree)):
        if tensor.device.type != device.type:
            waiting.setdefault((tensor.dtype, tensor.device.type), {})[id(tensor)] = tensor
    found: dict[int, Tensor] = {}
    for together in (piece for group in waiting.values() for piece in _pieces(list(group.values()))):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in together]).to(device)
        parts = torch.split(flat, [tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True):
            found[id(tensor)] = part.view(tensor.shape).clone()
    return [map_leaves(lambda leaf: found.get(id(leaf), leaf), tree) for tree in trees]


def _pieces(group: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of bounded size altogether."""
    piece, size = list[Tensor](), 0
    for tensor in group:
        if piece and size + tensor.nbytes > _MOST_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece
