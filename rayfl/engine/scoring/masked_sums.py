"""Whether the sums of a user's own measures leave out the samples that fill up stacked clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.errors import MethodError
from rayfl.metrics import MeasuresBySample

_ROWS = 1 << 12


def sums_twice(measures: MeasuresBySample, found: Sequence[Tensor]) -> Tensor | None:
    """Returns sums over samples, and those over the same samples where as many others do not count.

    The others are copies of them: whatever is not 0 in a sum shows whether they were added.

    Args:
        measures: whose sums they are.
        found: what ``by_sample`` found, tensors of n rows.

    Returns:
        Shape (2, ``measures.size``), on the device, without waiting for it; None for sums of rayfl's own.
    """
    if str(getattr(type(measures).added, "__module__", "")).split(".")[0] == "rayfl":
        return None
    some = [column[:_ROWS] for column in found]
    count = len(some[0])
    mask = torch.arange(2 * count, device=some[0].device) < count
    # Two sets at a time, as stacked clients are: sums over all of them at once would show, too.
    plain = measures.added([column.expand(2, *column.shape) for column in some])
    masked = measures.added(
        [torch.cat([column, column]).expand(2, -1, *column.shape[1:]) for column in some], mask.expand(2, -1)
    )
    return torch.stack([plain[0], masked[0]])


def check_sums(measures: MeasuresBySample, sums: np.ndarray) -> None:
    """Refuses sums that depend on samples that do not count.

    Args:
        measures: whose sums they are.
        sums: of :func:`sums_twice`, on the CPU.

    Raises:
        MethodError: naming the class and the fix.
    """
    if not np.allclose(sums[0], sums[1], rtol=1e-4, atol=1e-6, equal_nan=True):
        name = type(measures).__name__
        raise MethodError(
            f"{name}.added counts samples that its mask leaves out (rayfl.metrics.measures.counted(values, mask) sets "
            "their values to 0)"
        )
