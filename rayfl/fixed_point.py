"""Fixed point: products as two integers in units of 2^-20 and 2^-72, and sums of such integers.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29), then split.
On CPUs NumPy does it, which takes a fraction of PyTorch's time to round, convert, add or compare integers, and to find
a true one; on accelerators PyTorch, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

Vector = Tensor | np.ndarray

HIGH_BITS = 20
LOW_BITS = 72
_CARRY_BITS = LOW_BITS - HIGH_BITS
_CARRY = 2.0**_CARRY_BITS
_HALF = 1 << (_CARRY_BITS - 1)
# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

# Elements worked on at a time, so that intermediate values stay in the cache.
_CHUNK = 8192


def stretches(vector: Tensor) -> Iterator[slice]:
    """Cuts a vector; accelerators lose more to the launches than they win by the cache."""
    size = _CHUNK if vector.device.type == "cpu" else max(1, len(vector))
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
    factor = weight * 2.0**HIGH_BITS
    if high.device.type == "cpu":
        _add_arrays(values.numpy(), factor, high.numpy(), low.numpy())
        return
    fine = values.double() * factor
    coarse = fine.round()
    high.add_(coarse.long())
    low.add_(fine.sub_(coarse).mul_(_CARRY).round_().long())


def _add_arrays(values: np.ndarray, factor: float, high: np.ndarray, low: np.ndarray) -> None:
    fine = np.multiply(values, factor, dtype=np.float64)
    coarse = np.rint(fine)
    np.add(high, coarse.astype(np.int64), out=high)
    np.subtract(fine, coarse, out=fine)
    np.multiply(fine, _CARRY, out=fine)
    np.rint(fine, out=fine)
    np.add(low, fine.astype(np.int64), out=low)


def carry(high: Tensor, low: Tensor) -> None:
    """Moves what exceeds half a unit of ``high`` out of ``low``, in place; the two are then unique."""
    if high.device.type == "cpu":
        _carry_arrays(high.numpy(), low.numpy())
        return
    excess = torch.add(low, _HALF).bitwise_right_shift_(_CARRY_BITS)
    high.add_(excess)
    low.sub_(excess.bitwise_left_shift_(_CARRY_BITS))


def _carry_arrays(high: np.ndarray, low: np.ndarray) -> None:
    excess = low + _HALF
    np.right_shift(excess, _CARRY_BITS, out=excess)
    np.add(high, excess, out=high)
    np.left_shift(excess, _CARRY_BITS, out=excess)
    np.subtract(low, excess, out=low)


def mean_into(mean: Tensor, high: Tensor, low: Tensor, weight: float) -> None:
    """Writes sums over ``weight``, as of unique integers, to a vector of float64; ``high`` and ``low`` change."""
    carry(high, low)
    mean.copy_(high).mul_(2.0**-HIGH_BITS).add_(low.double().mul_(2.0**-LOW_BITS)).div_(weight)


def fresh(vector: Vector | None) -> Tensor | None:
    """A copy as a tensor."""
    if vector is None:
        return None
    return vector.clone() if isinstance(vector, Tensor) else torch.tensor(vector)


def piece(vector: Vector | None, here: slice, device: torch.device) -> Tensor:
    """Some elements as a tensor on ``device``; of a read-only array a copy."""
    assert vector is not None
    return vector[here].to(device) if isinstance(vector, Tensor) else torch.tensor(vector[here], device=device)


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
