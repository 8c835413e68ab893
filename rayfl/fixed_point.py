"""Fixed point: products as two integers in units of 2^-20 and 2^-72, and sums of such integers.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29), then split.
On CPUs compiled loops do it in one pass; until they are loaded, and on accelerators, PyTorch does it in several, with
the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rayfl.kernels import CARRY_BITS, HIGH_BITS, LOW_BITS, Kernels, kernels, spent

Vector = Tensor | np.ndarray

# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

# Elements worked on at a time, so that intermediate values stay in the cache.
_CHUNK = 32768


def stretches(vector: Vector) -> Iterator[slice]:
    """Cuts a vector; accelerators lose more to the launches than they win by the cache."""
    size = _CHUNK if isinstance(vector, np.ndarray) or vector.device.type == "cpu" else max(1, len(vector))
    for start in range(0, len(vector), size):
        yield slice(start, min(start + size, len(vector)))


def add_products(values: Tensor, weight: float, high: Tensor, low: Tensor) -> None:
    """Adds ``weight * values`` to the two integers of each element, in place.

    Args:
        values: float32 or float64, shape (n,).
        weight: a factor.
        high: units of 2^-20, int64, shape (n,).
        low: units of 2^-72, int64, shape (n,).
    """
    loops, factor = _loops(high), weight * 2.0**HIGH_BITS
    if loops is not None:
        loops.add_products(values.numpy(), factor, high.numpy(), low.numpy())
        return
    begun = time.perf_counter()
    for here in stretches(high):
        fine = values[here].double() * factor
        coarse = fine.round()
        add_integers(high[here], coarse.long())
        add_integers(low[here], fine.sub_(coarse).mul_(2.0**CARRY_BITS).round_().long())
    if high.device.type == "cpu":
        spent(time.perf_counter() - begun)


def carry(high: Tensor, low: Tensor) -> None:
    """Moves what exceeds half a unit of ``high`` out of ``low``, in place; the two are then unique."""
    loops = _loops(high)
    if loops is not None:
        loops.carry(high.numpy(), low.numpy())
        return
    excess = (low + (1 << (CARRY_BITS - 1))).bitwise_right_shift_(CARRY_BITS)
    high.add_(excess)
    low.sub_(excess.bitwise_left_shift_(CARRY_BITS))


def mean_into(mean: Tensor, high: Tensor, low: Tensor, weight: float) -> None:
    """Writes sums over ``weight``, as of unique integers, to a vector of float64; ``high`` and ``low`` may change."""
    loops = _loops(high)
    if loops is not None:
        loops.mean(high.numpy(), low.numpy(), weight, mean.numpy())
        return
    carry(high, low)
    mean.copy_(high).mul_(2.0**-HIGH_BITS).add_(low.double().mul_(2.0**-LOW_BITS)).div_(weight)


def _loops(vector: Tensor) -> Kernels | None:
    return kernels() if vector.device.type == "cpu" else None


def fresh(vector: Vector | None) -> Tensor | None:
    """A copy as a tensor."""
    if vector is None:
        return None
    return vector.clone() if isinstance(vector, Tensor) else torch.tensor(vector)


def piece(vector: Vector | None, here: slice, device: torch.device) -> Tensor:
    """Some elements as a tensor on ``device``; of a read-only array a copy."""
    assert vector is not None
    return vector[here].to(device) if isinstance(vector, Tensor) else torch.tensor(vector[here], device=device)


# On CPUs NumPy takes a fraction of PyTorch's time to add or compare integers, and to find a true one.


def add_integers(total: Tensor, integers: Vector) -> None:
    """Adds in place."""
    if total.device.type == "cpu":
        array = integers.numpy() if isinstance(integers, Tensor) else integers
        np.add(total.numpy(), array, out=total.numpy())
    else:
        total.add_(torch.as_tensor(integers, device=total.device))


def same(one: Tensor, other: Tensor) -> Tensor:
    """Where two vectors agree to the bit, in the type of the first."""
    bits = BITS[one.dtype]
    one, other = one.view(bits), other.to(one.dtype).view(bits)
    return torch.from_numpy(one.numpy() == other.numpy()) if one.device.type == "cpu" else one == other


def any_true(mask: Tensor) -> bool:
    """Whether a mask is anywhere true."""
    return bool(mask.numpy().any() if mask.device.type == "cpu" else mask.any())
