"""Loops over arrays, compiled by Numba: what takes NumPy or PyTorch several passes over memory, in one.

Each has the operations and the rounding of what :mod:`rayfl.fixed_point` and :mod:`rayfl.closed_form` have besides,
which say what they compute.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_log = logging.getLogger("rayfl")

HIGH_BITS = 20
LOW_BITS = 72
CARRY_BITS = LOW_BITS - HIGH_BITS
_CARRY = 2.0**CARRY_BITS
_HALF = 1 << (CARRY_BITS - 1)
_HIGH_UNIT, _LOW_UNIT = 2.0**-HIGH_BITS, 2.0**-LOW_BITS


def _add_products(values: Any, factor: float, high: Any, low: Any) -> None:
    for i in range(values.size):
        fine = np.float64(values[i]) * factor
        coarse = np.rint(fine)
        high[i] += np.int64(coarse)
        low[i] += np.int64(np.rint((fine - coarse) * _CARRY))


def _carry(high: Any, low: Any) -> None:
    for i in range(high.size):
        excess = (low[i] + _HALF) >> CARRY_BITS
        high[i] += excess
        low[i] -= excess << CARRY_BITS


def _mean(high: Any, low: Any, weight: float, mean: Any) -> None:
    for i in range(high.size):
        excess = (low[i] + _HALF) >> CARRY_BITS
        coarse = np.float64(high[i] + excess) * _HIGH_UNIT
        fine = np.float64(low[i] - (excess << CARRY_BITS)) * _LOW_UNIT
        mean[i] = (coarse + fine) / weight


def _add_pull(values: Any, anchor: Any, factor: Any, gradient: Any) -> None:
    for i in range(values.size):
        gradient[i] += (values[i] - anchor[i]) * factor


class Kernels(NamedTuple):
    """The compiled loops; all arrays are one-dimensional.

    Attributes:
        add_products: ``(values, factor, high, low)``; see :func:`rayfl.fixed_point.add_products`.
        carry: ``(high, low)``; see :func:`rayfl.fixed_point.carry`.
        mean: ``(high, low, weight, mean)``; see :func:`rayfl.fixed_point.mean_into`.
        add_pull: ``(values, anchor, factor, gradient)``; see :func:`rayfl.closed_form.pulling`.
    """

    add_products: Callable[[Any, float, Any, Any], None]
    carry: Callable[[Any, Any], None]
    mean: Callable[[Any, Any, float, Any], None]
    add_pull: Callable[[Any, Any, Any, Any], None]


_WORTH_LOADING_S = 1.0
_lock = threading.Lock()
_spent = 0.0
_loading: threading.Thread | None = None
_loaded: Kernels | None = None


def kernels() -> Kernels | None:
    """The loops; None until they are loaded, and where Numba does not work."""
    return _loaded


def spent(seconds: float) -> None:
    """Notes time that was spent on doing without: a second of it has them loaded, beside everything else.

    Loading takes about as long, and longer on a machine's first run. Short runs do without.
    """
    global _spent
    _spent += seconds
    if _spent > _WORTH_LOADING_S and _loading is None:
        _begin()


def _begin() -> threading.Thread:
    global _loading
    with _lock:
        if _loading is None:
            _loading = threading.Thread(target=_load, name="rayfl-kernels")
            _loading.start()
        return _loading


def loaded_kernels() -> Kernels | None:
    """The loops, waited for; None where Numba does not work."""
    _begin().join()
    return _loaded


def _load() -> None:
    global _loaded
    try:
        found = compiled()
        # A loop is compiled, or read from disk, when it is first used with a type.
        values, integers = np.zeros(1, np.float32), np.zeros(1, np.int64)
        found.add_products(values, 1.0, integers, integers.copy())
        found.mean(integers, integers.copy(), 1.0, np.zeros(1))
        found.add_pull(values, values, np.float32(1), values.copy())
        _loaded = found
    except ImportError:
        pass
    except Exception as error:
        _log.warning("Numba does not work here (%s: %s): exact sums take longer", type(error).__name__, error)


def compiled() -> Kernels:
    """The loops for Numba to compile at their first use, and to keep on disk; raises ImportError without Numba."""
    import numba

    def compile(loop: Callable[..., None]) -> Any:
        try:
            return numba.njit(loop, cache=True, nogil=True)
        except RuntimeError:  # there is no folder where it could keep them
            return numba.njit(loop, nogil=True)

    return Kernels(compile(_add_products), compile(_carry), compile(_mean), compile(_add_pull))
