"""Networks in bfloat16, and recurrent weights as cuDNN reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def narrowed(dtype: torch.dtype, device: torch.device, recurrent: bool) -> Iterator[None]:
    """What is multiplied in the body is rounded to ``dtype`` before, as PyTorch's autocast has it.

    Args:
        dtype: such as ``torch.bfloat16``.
        device: where the tensors are.
        recurrent: whether there are recurrent layers. On CPUs oneDNN is left out then: it has LSTMs in bfloat16 for
            some processors only.
    """
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


def in_one_block(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies the weights of a recurrent module into one piece of memory, all matrices before all biases.

    That is how cuDNN reads them: weights that lie elsewhere are copied at each call, with a warning.
    """
    order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
    block = torch.cat([weights[i].reshape(-1) for i in order])
    parts = dict(zip(order, torch.split(block, [weights[i].numel() for i in order]), strict=True))
    return [parts[i].view(weights[i].shape) for i in range(len(weights))]
