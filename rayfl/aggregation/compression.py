"""Lossy compression of what clients send: a message becomes what the server can decode, and its bytes are counted.

Sources: Stich, Cordonnier, Jaggi, NeurIPS 2018 (the largest or random entries, with memory); Alistarh et al., NeurIPS
2017 (random rounding, QSGD); Karimireddy et al., ICML 2019 (signs with error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_INDEX_BYTES = 4
_SCALE_BYTES = 4


def entries_kept(entries: int, share: float) -> int:
    """Returns how many of the entries are sent: the share of them, rounded up."""
    return min(entries, math.ceil(share * entries - 1e-9))


def on_device(drawn: np.ndarray, device: torch.device) -> Tensor:
    """Returns what was drawn, on a device; from pinned memory, so that the host waits for no work of a GPU."""
    found = torch.as_tensor(drawn)
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


def largest(change: Tensor, kept: int) -> Tensor:
    """Returns the change with zeros in place of all but the entries of the largest magnitude.

    Args:
        change: of shape (P,).
        kept: how many entries remain.
    """
    places = change.abs().topk(kept, sorted=False).indices
    return torch.zeros_like(change).index_copy_(0, places, change[places])


def at_random(change: Tensor, kept: int, generator: np.random.Generator) -> Tensor:
    """Returns the change with zeros in place of all but some entries, all equally likely.

    Args:
        change: of shape (P,).
        kept: how many entries remain.
        generator: draws them.
    """
    places = on_device(generator.choice(len(change), kept, replace=False, shuffle=False), change.device)
    return torch.zeros_like(change).index_copy_(0, places, change[places])


def rounded(change: Tensor, sizes: Sequence[int], bits: int, generator: np.random.Generator) -> Tensor:
    """Returns the change with each entry rounded at random to one of 2^bits - 1 levels; right on average.

    The levels of a tensor are evenly spaced from minus to plus its largest magnitude.

    Args:
        change: of shape (P,), the tensors of a message one after another.
        sizes: entries of each tensor.
        bits: b of an entry, at least 2.
        generator: draws one number an entry.
    """
    levels = 2 ** (bits - 1) - 1
    draws = on_device(generator.random(len(change), dtype=np.float32), change.device)
    made = []
    for part, draw in zip(torch.split(change, list(sizes)), torch.split(draws, list(sizes)), strict=True):
        if not len(part):
            continue
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        step = wide.abs().max() / levels
        scaled = torch.where(step > 0, wide / step, 0.0)
        # In float32 the sum of the largest entry and a draw just below 1 is rounded up.
        made.append(((scaled + draw).floor().clamp(-levels, levels) * step).to(part.dtype))
    return torch.cat(made)


def signs(change: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns each entry's sign times the mean magnitude of its tensor; zero counts as positive.

    Args:
        change: of shape (P,), the tensors of a message one after another.
        sizes: entries of each tensor.
    """
    parts = [part for part in torch.split(change, list(sizes)) if len(part)]
    return torch.cat([part.abs().mean() * torch.where(part < 0, -1.0, 1.0).to(part) for part in parts])


def sparse_bytes(entries: int, kept: int, value_bytes: int) -> int:
    """Returns the bytes of some values and of where they belong: an index for each or a bit for each entry.

    Args:
        entries: P.
        kept: how many are sent.
        value_bytes: of one value.
    """
    return kept * value_bytes + min(kept * _INDEX_BYTES, (entries + 7) // 8)


def dense_bytes(sizes: Sequence[int], bits: int) -> int:
    """Returns the bytes of all entries, and of one float32 for each tensor.

    Args:
        sizes: entries of each tensor.
        bits: of an entry.
    """
    return sum((size * bits + 7) // 8 + _SCALE_BYTES for size in sizes if size)
