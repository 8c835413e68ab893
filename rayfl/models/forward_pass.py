"""What layers are told about the forward pass that they are in, beside their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from rayfl.errors import ModelError
from rayfl.models.splitmix import FIRST, GAMMA, SECOND, signed, words

_CALL = 0xD1342543DE82EF95
_PLACES = 0xA0761D6478BD642F
_LANES = 1 << 16


class ForwardPass:
    """Which rows of a mini-batch are padding, and which random numbers the step has.

    Random numbers come from SplitMix64, a counter-based generator: those of an entry of a tensor depend on the key of
    the step, on how many tensors of random numbers the step has had before, and on the place of the entry. So a client
    has the same numbers alone and in a stack, where its mini-batches are padded at their end.

    Attributes:
        mask: 1 for samples and 0 for padding, shape (b,); None if all are samples.
        padded: whether mini-batches of the step have padding somewhere.
        key: of the step, int64 of shape (); None where there is none: then PyTorch's generator is asked for one.
        calls: how many tensors of random numbers the step has had.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.padded = False
        self.key: Tensor | None = None
        self.calls = 0

    def mask_of(self, x: Tensor) -> Tensor | None:
        """The mask of the rows of ``x``.

        Raises:
            ModelError: it is not known, since ``x`` has other rows than the mini-batch.
        """
        if self.mask is None and not self.padded:
            return None
        if self.mask is None or len(self.mask) != len(x):
            raise ModelError(
                "a layer normalizes by statistics of rows of which some are padding, it is not known which"
            )
        return self.mask

    def kept(self, shape: Sequence[int], share: float, like: Tensor) -> Tensor:
        """Draws what dropout multiplies with: 0, or 1 / share with the probability ``share``.

        Args:
            shape: of the result.
            share: rounded to a multiple of 1 / 65536.
            like: has its type and device.
        """
        key, call = self.key, self.calls
        if key is None:
            key, call = torch.randint(1 << 62, (), dtype=torch.int64).to(like.device), 0
        entries, lanes = math.prod(shape), min(max(round(share * _LANES), 1), _LANES - 1)
        self.calls += 1
        alone = get_proxy_mode() is None and not is_stacked(key)
        draw = _factors if alone else _opaque_factors
        return draw(key, signed(call * _CALL), entries, lanes, like.dtype).view(tuple(shape))

    def places(self, rows: int, count: int, among: int, device: torch.device) -> Tensor:
        """Draws places for each row of a mini-batch, with repetition: the same ones in all passes of a step.

        Args:
            rows: b; the places of a row do not depend on how many follow it.
            count: how many places a row has.
            among: places are 0 to this number minus 1.
            device: of the result where there is no key; the key is 0 then.

        Returns:
            int64 of shape (b, count).
        """
        key = torch.zeros((), dtype=torch.int64, device=device) if self.key is None else self.key
        alone = get_proxy_mode() is None and not is_stacked(key)
        draw = _places if alone else _opaque_places
        return draw(key, rows * count, among).view(rows, count)


def _factors(key: Tensor, offset: int, entries: int, lanes: int, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies with, shape (*key.shape, entries).

    Args:
        key: of the step, int64 of any shape.
        offset: of the tensor of random numbers in the step.
        entries: how many numbers.
        lanes: how many of 65536 are kept.
        dtype: of the result.
    """
    bits = words(key, -(-entries // 4), offset)
    kept = bits.view(torch.int16)[..., :entries] < lanes - _LANES // 2
    return kept.to(dtype).mul_(_LANES / lanes)


# One operation in a stack, since PyTorch up to 2.11 or later cannot stack views of another type, and when a step is
# traced: its products of 64-bit integers overflow, which C++ leaves undefined. Where they stand in a loop, compilers
# take for granted that it ends before they do, and write past the array.
_opaque_factors = torch.library.custom_op("rayfl::dropout_factors", _factors, mutates_args=())


@_opaque_factors.register_fake
def _(key: Tensor, offset: int, entries: int, lanes: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty((*key.shape, entries), dtype=dtype)


@_opaque_factors.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: Tensor, *others: Any) -> tuple[Tensor, int]:
    assert in_dims[0] is not None  # nothing else is a tensor
    return _opaque_factors(key.movedim(in_dims[0], 0), *others), 0


def _places(key: Tensor, entries: int, among: int) -> Tensor:
    """Numbers below ``among``, int64 of shape (*key.shape, entries), from random bits that dropout does not read."""
    return (words(key, entries, signed(_PLACES)) >> 33 & (1 << 31) - 1) % among


_opaque_places = torch.library.custom_op("rayfl::places", _places, mutates_args=())


@_opaque_places.register_fake
def _(key: Tensor, entries: int, among: int) -> Tensor:
    return key.new_empty((*key.shape, entries))


@_opaque_places.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: Tensor, entries: int, among: int) -> tuple[Tensor, int]:
    assert in_dims[0] is not None  # nothing else is a tensor
    return _opaque_places(key.movedim(in_dims[0], 0), entries, among), 0


class Stackable(nn.Module):
    """A layer with a form for stacked clients.

    Attributes:
        forward_pass: that of the network; a layer alone knows neither padding nor keys.
    """

    forward_pass = ForwardPass()


def keys_of(seeds: Sequence[int], begun: Sequence[int], steps: int) -> np.ndarray:
    """The keys of steps, int64 of shape (steps, clients).

    Args:
        seeds: by client, a 63-bit integer.
        begun: by client, how many of its steps there have been before.
        steps: how many there are.
    """
    number = np.arange(1, steps + 1, dtype=np.uint64)[:, None] + np.asarray(begun, np.uint64)
    bits = np.asarray(seeds, np.uint64) + number * np.uint64(GAMMA)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
    found: np.ndarray = (bits ^ (bits >> np.uint64(31))).view(np.int64)
    return found


def is_stacked(tensor: Tensor) -> bool:
    """Returns whether a tensor stands for those of several clients (under ``vmap``)."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
