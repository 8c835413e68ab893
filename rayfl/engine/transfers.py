"""Tensors of many trees from one device to another, in few transfers.

To and from GPUs they go through pinned memory, which is read and written without the processor's help. PyTorch keeps
such memory for the next transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
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
        flat = _moved([tensor.detach().reshape(-1) for tensor in together], device)
        parts = torch.split(flat, [tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True):
            found[id(tensor)] = part.view(tensor.shape).clone()
    return [map_leaves(lambda leaf: found.get(id(leaf), leaf), tree) for tree in trees]


def _moved(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Flat tensors of one device, end to end on another one."""
    here = parts[0].device
    if "cuda" not in (here.type, device.type):
        return torch.cat(list(parts)).to(device)
    size, kind = sum(map(len, parts)), parts[0].dtype
    pinned = torch.empty(size, dtype=kind, pin_memory=True)
    if device.type == "cuda":
        torch.cat(list(parts), out=pinned)
        return pinned.to(device, non_blocking=True)
    pinned.copy_(torch.cat(list(parts)), non_blocking=True)
    torch.cuda.current_stream(here).synchronize()
    return pinned


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is transferred in its body does not wait for the device's work; :func:`join` has later work wait for it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


def join(device: torch.device, arrived: Sequence[Tensor]) -> None:
    """Has the device's further work wait for what was transferred beside it.

    Args:
        device: where.
        arrived: the tensors; their memory is not used again before that work is done.
    """
    if device.type != "cuda":
        return
    current = torch.cuda.current_stream(device)
    current.wait_stream(_side_stream(device))
    for tensor in arrived:
        tensor.record_stream(current)


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
