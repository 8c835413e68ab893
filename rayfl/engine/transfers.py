"""Tensors of many trees from one device to another, in few transfers.

To and from GPUs they go through pinned memory, which is read and written without the processor's help. PyTorch keeps
such memory for the next transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, map_leaves, own_dicts, tensors

_CPU = torch.device("cpu")
_MOST_BYTES = 256 << 20
"""Moved at a time, since what is moved together lies in memory once more."""


def move_trees(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[Tree]:
    """The trees with all tensors on a device; each of those that were elsewhere has memory of its own.

    Tensors of one type travel together. What is on the device already stays as it is.

    Args:
        trees: any trees; leaves that are no tensors stay.
        device: where to.
    """
    return _with(trees, ((piece, _moved(_flat(piece), device)) for piece in _travelling(trees, device)))


def start_copy_to_cpu(trees: Sequence[Mapping[str, Any]]) -> Callable[[], list[Tree]]:
    """Begins to bring trees to the CPU, beside what their device is asked for next.

    Args:
        trees: any trees; nobody changes their tensors in place.

    Returns:
        A function that waits for them, and returns them as :func:`move_trees` does.
    """
    sent = [(piece, _sent(_flat(piece))) for piece in _travelling(trees, _CPU)]
    return lambda: _with(trees, ((piece, arrived()) for piece, arrived in sent))


def _travelling(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[list[Tensor]]:
    """The tensors that are elsewhere, in pieces that travel together: of one type, and of bounded size."""
    waiting: dict[tuple[torch.dtype, str], dict[int, Tensor]] = {}
    for tensor in (tensor for tree in trees for tensor in tensors(tree)):
        if tensor.device.type != device.type:
            waiting.setdefault((tensor.dtype, tensor.device.type), {})[id(tensor)] = tensor
    return [piece for group in waiting.values() for piece in _pieces(list(group.values()))]


def _flat(piece: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().reshape(-1) for tensor in piece]


def _with(trees: Sequence[Mapping[str, Any]], moved: Iterable[tuple[Sequence[Tensor], Tensor]]) -> list[Tree]:
    """The trees with what has moved in the place of the tensors that it is of."""
    found: dict[int, Tensor] = {}
    for piece, flat in moved:
        parts = torch.split(flat, [tensor.numel() for tensor in piece])
        found |= {id(old): part.view(old.shape).clone() for old, part in zip(piece, parts, strict=True)}
    if not found:
        return [own_dicts(tree) for tree in trees]
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


def _sent(parts: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Begins to bring flat tensors to the CPU, end to end; returns what waits for them."""
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
def _side_stream(device: torch.device, home: bool = False) -> Any:
    """Returns a stream for transfers to a device; or home, which have an engine of their own there."""
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
