"""Random numbers that depend on a key and their place alone: as many as a model has, without storing them.

An objective that draws noise of the size of its model gets a key for each step from ``draw``, and makes the numbers
itself. So a client has the same numbers alone and in a stack, and a pass stores a few bytes a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from rayfl.models.forward_pass import is_stacked
from rayfl.models.splitmix import words

_BYTES = 7
"""Of a key: draws have the type of the model's tensors, and all of these types have the numbers below 256."""


def drawn_keys(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws keys, float64 of shape (*shape, 7): an entry of what ``draw`` returns."""
    return generator.integers(256, size=(*shape, _BYTES)).astype(np.float64)


def normals(key: Tensor, count: int) -> Tensor:
    """Standard normal numbers, shape (*, count), of the key's type (or float32 before they are rounded to it).

    By Box and Muller's transform of the two halves of each of SplitMix64's words: none is above 6.8 in size.

    Args:
        key: of :func:`drawn_keys`, shape (*, 7): numbers of one key do not depend on the others.
        count: how many.
    """
    return _made(keyed_normals, _opaque_normals, key, count)


def uniforms(key: Tensor, count: int) -> Tensor:
    """Uniform numbers between 0 and 1, (i + 1/2) / 2^32; arguments and type as of :func:`normals`."""
    return _made(keyed_uniforms, _opaque_uniforms, key, count)


def _made(plain: Any, opaque: Any, key: Tensor, count: int) -> Tensor:
    number = (key.to(torch.int64) << 8 * torch.arange(_BYTES, device=key.device)).sum(-1)
    dtype = torch.promote_types(key.dtype, torch.float32)
    alone = get_proxy_mode() is None and not is_stacked(number)
    found: Tensor = (plain if alone else opaque)(number, count, dtype)
    return found.to(key.dtype)


def keyed_normals(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, shape (*key.shape, count).

    Args:
        key: int64 of any shape.
        count: how many.
        dtype: float32 or float64.
    """
    bits = words(key, -(-count // 2))
    half, low = 2.0**-32, (1 << 32) - 1
    length = ((bits >> 32 & low).to(dtype).add_(0.5).mul_(half)).log_().mul_(-2).sqrt_()
    angle = (bits & low).to(dtype).mul_(2 * math.pi * half)
    return torch.cat([length * angle.cos(), length * angle.sin()], -1)[..., :count]


def keyed_uniforms(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Uniform numbers, shape (*key.shape, count); arguments as of :func:`keyed_normals`."""
    bits = words(key, -(-count // 2))
    low = (1 << 32) - 1
    halves = torch.cat([bits >> 32 & low, bits & low], -1)[..., :count]
    return halves.to(dtype).add_(0.5).mul_(2.0**-32)


# One operation in a stack and when a step is traced, as for dropout (rayfl.models.forward_pass): its products overflow.
_opaque_normals = torch.library.custom_op("rayfl::normals", keyed_normals, mutates_args=())


@_opaque_normals.register_fake
def _(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty((*key.shape, count), dtype=dtype)


@_opaque_normals.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: Tensor, *others: Any) -> tuple[Tensor, int]:
    assert in_dims[0] is not None  # nothing else is a tensor
    return _opaque_normals(key.movedim(in_dims[0], 0), *others), 0


_opaque_uniforms = torch.library.custom_op("rayfl::uniforms", keyed_uniforms, mutates_args=())


@_opaque_uniforms.register_fake
def _(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty((*key.shape, count), dtype=dtype)


@_opaque_uniforms.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: Tensor, *others: Any) -> tuple[Tensor, int]:
    assert in_dims[0] is not None  # nothing else is a tensor
    return _opaque_uniforms(key.movedim(in_dims[0], 0), *others), 0
