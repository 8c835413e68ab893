"""Sets the precision of matrix products on GPUs by PyTorch's flags, whose defaults differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Precision = Literal["float32", "tf32", "bfloat16"]
_AMPERE = (8, 0)
_BACKENDS = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def set_arithmetic(precision: Precision) -> None:
    """Sets the precision of this process's float32 matrix products and convolutions.

    With ``tf32`` a GPU rounds the factors to 10 bits of mantissa; else nothing is rounded. PyTorch's own default is
    mixed: cuDNN rounds, cuBLAS does not. ``bfloat16`` is a matter of the networks (:meth:`Network.compute_in`); what
    lies outside of them is float32.
    """
    for backend in _backends():
        backend.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Sets the arithmetic for the body of a ``with`` statement, and restores what was set before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    every, reduced = [(one, one.fp32_precision) for one in _backends()], matmul.allow_bf16_reduced_precision_reduction
    try:
        older = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        older = None  # where the newer flags contradict each other the older ones cannot be read
    set_arithmetic(precision)
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            matmul.allow_tf32, cudnn.allow_tf32 = older[1:]
        for backend, before in every:
            backend.fp32_precision = before
        matmul.allow_bf16_reduced_precision_reduction = reduced


def why_not(precision: Precision, device: torch.device) -> list[str]:
    """Returns warnings if a device lacks a precision: what it does instead; empty if it has it."""
    if precision == "tf32" and device.type != "cuda":
        return [f"engine.precision=tf32 is for GPUs: on {device.type} it is float32"]
    if precision == "float32" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= _AMPERE:
        return []
    instead = "it is float32" if precision == "tf32" else "it is emulated, and slow"
    name = torch.cuda.get_device_name(device)
    return [f"engine.precision={precision} is for GPUs of the Ampere generation and later: on {name} {instead}"]


def _backends() -> list[Any]:
    """Returns the objects that hold PyTorch's precision, the global one first; none before PyTorch 2.9."""
    found: list[Any] = [torch.backends]
    for path in _BACKENDS:
        backend: Any = torch.backends
        for name in path.split("."):
            backend = getattr(backend, name, None)
        found.append(backend)
    return [backend for backend in found if hasattr(backend, "fp32_precision")]
