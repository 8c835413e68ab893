"""Moves the tensors of many trees between devices in few transfers.

Transfers to and from GPUs go through pinned memory, which a GPU reads and writes by DMA. PyTorch caches such memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, copies, map_leaves, own_dicts, tensors

_CPU = torch.device("cpu")
MOVE_BYTES = 256 << 20
"""Bytes that are moved at a time, since what is moved together lies in memory once more."""


def move_trees(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[Tree]:
    """Moves the trees' tensors to a device; each moved tensor has its own memory.

    Tensors of one type are transferred together. Tensors already on the device are returned as they are.

    Args:
        trees: any trees; leaves that are not tensors stay.
        device: the destination.
    """
    return _with(trees, ((piece, joined_on(_flat(piece), device)) for piece in _travelling(trees, device)))


def start_copy_to_cpu(trees: Sequence[Mapping[str, Any]]) -> Callable[[], list[Tree]]:
    """Starts to copy trees to the CPU, concurrently with the device's further work.

    Args:
        trees: any trees; their tensors must not be changed in place.

    Returns:
        A function that waits for the copies, and returns them like :func:`move_trees`.
    """
    sent = [(piece, _sent(_flat(piece))) for piece in _travelling(trees, _CPU)]
    return lambda: _with(trees, ((piece, arrived()) for piece, arrived in sent))


def _travelling(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[list[Tensor]]:
    """Groups the tensors on other devices into transfers of one type and bounded size."""
    waiting: dict[tuple[torch.dtype, str], dict[int, Tensor]] = {}
    for tensor in (tensor for tree in trees for tensor in tensors(tree)):
        if tensor.device.type != device.type:
            waiting.setdefault((tensor.dtype, tensor.device.type), {})[id(tensor)] = tensor
    return [piece for group in waiting.values() for piece in _pieces(list(group.values()))]


def _flat(piece: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().reshape(-1) for tensor in piece]


def _with(trees: Sequence[Mapping[str, Any]], moved: Iterable[tuple[Sequence[Tensor], Tensor]]) -> list[Tree]:
    """Returns the trees with moved tensors in place of the originals."""
    found: dict[int, Tensor] = {}
    for piece, flat in moved:
        parts = torch.split(flat, [tensor.numel() for tensor in piece])
        shaped = [part.view(old.shape) for old, part in zip(piece, parts, strict=True)]
        found |= zip(map(id, piece), copies(shaped), strict=True)
    if not found:
        return [own_dicts(tree) for tree in trees]
    return [map_leaves(lambda leaf: found.get(id(leaf), leaf), tree) for tree in trees]


def joined_on(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns flat tensors of one device as a single one on another device.

    Args:
        parts: tensors of one type, shape (n,) each.
        device: where the result is; to and from a GPU it goes through pinned memory.
    """
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


def _sent(parts: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Starts to copy flat tensors to the CPU, concatenated; returns a function that waits for the result."""
    here = parts[0].device
    if here.type != "cuda":
        flat = torch.cat(list(parts))
        return lambda: flat.to(_CPU)
    side, pinned = (
        _side_stream(here, home=True),
        torch.empty(sum(map(len, parts)), dtype=parts[0].dtype, pin_memory=True),
    )
    side.wait_stream(torch.cuda.current_stream(here))
    with torch.cuda.stream(side):
        pinned.copy_(torch.cat(list(parts)), non_blocking=True)
    for part in parts:
        part.record_stream(side)
    done = side.record_event()

    def arrived() -> Tensor:
        done.synchronize()
        return pinned

    return arrived


@contextmanager
def copy_stream(device: torch.device) -> Iterator[None]:
    """Runs transfers in its body on a side stream, concurrently with the device's work; :func:`join` synchronizes."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


def join(device: torch.device, arrived: Sequence[Tensor]) -> None:
    """Makes the device's further work wait for transfers on the side stream.

    Args:
        device: the destination.
        arrived: the moved tensors; recorded on the current stream, so that their memory is not reused too early.
    """
    if device.type != "cuda":
        return
    current = torch.cuda.current_stream(device)
    current.wait_stream(_side_stream(device))
    for tensor in arrived:
        tensor.record_stream(current)


@cache
def _side_stream(device: torch.device, home: bool = False) -> Any:
    """Returns the side stream for transfers to a device, or with ``home`` from it: GPUs have a copy engine for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pieces(group: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields groups of consecutive tensors with a bounded total size."""
    piece, size = list[Tensor](), 0
    for tensor in group:
        if piece and size + tensor.nbytes > MOVE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece
