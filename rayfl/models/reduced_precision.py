"""Networks that compute in a narrower type than their parameters have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd


def has_broad_kernels(module: nn.Module) -> bool:
    """Returns whether a network has convolutions that oneDNN computes wrong in bfloat16 on some processors.

    Those with AMX, by the oneDNN of PyTorch 2.15: results have nothing to do with the convolution where kernels have
    fewer than 16 channels, and their width times these is 64 or a larger multiple of 32. Such are waveforms of two
    channels under kernels of width 80.
    """
    convolutions = (found for found in module.modules() if isinstance(found, _ConvNd))
    sides = ((one.weight.shape[1], one.kernel_size[-1]) for one in convolutions)
    return any(c < 16 and c * width >= 64 and c * width % 32 == 0 for c, width in sides)


@contextmanager
def reduced_precision(dtype: torch.dtype, device: torch.device, recurrent: bool, broad: bool = False) -> Iterator[None]:
    """Has PyTorch's autocast compute in ``dtype`` in the body of a ``with`` statement.

    Args:
        dtype: such as ``torch.bfloat16``.
        device: where the tensors are.
        recurrent: whether libraries compute recurrent layers. On CPUs oneDNN is left out then: it has LSTMs in bfloat16
            for some processors only. On GPUs the whole network keeps the type of its parameters: there autocast gives
            cuDNN's recurrent layers float16, whatever ``dtype`` is, whose gradients vanish without a scale.
        broad: whether the network :func:`has_broad_kernels`. On CPUs oneDNN is left out then, too.
    """
    if recurrent and device.type == "cuda":
        yield
        return
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    if (recurrent or broad) and device.type == "cpu":
        onednn.enabled = False
    try:
        # A cache would keep parameters as they were before a step moved them in place.
        with torch.autocast(device.type, dtype, cache_enabled=False):
            yield
    finally:
        onednn.enabled = before
