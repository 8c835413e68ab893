"""Networks that compute in a narrower type than their parameters have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reduced_precision(dtype: torch.dtype, device: torch.device, recurrent: bool) -> Iterator[None]:
    """Has PyTorch's autocast compute in ``dtype`` in the body of a ``with`` statement.

    Args:
        dtype: such as ``torch.bfloat16``.
        device: where the tensors are.
        recurrent: whether libraries compute recurrent layers. On CPUs oneDNN is left out then: it has LSTMs in bfloat16
            for some processors only. On GPUs the whole network keeps the type of its parameters: there autocast gives
            cuDNN's recurrent layers float16, whatever ``dtype`` is, whose gradients vanish without a scale.
    """
    if recurrent and device.type == "cuda":
        yield
        return
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    if recurrent and device.type == "cpu":
        onednn.enabled = False
    try:
        # A cache would keep parameters as they were before a step moved them in place.
        with torch.autocast(device.type, dtype, cache_enabled=False):
            yield
    finally:
        onednn.enabled = before
