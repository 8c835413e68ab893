"""A pretended accelerator: tensors that say they are elsewhere, and refuse what a GPU refuses.

What runs under :func:`elsewhere` computes on this processor, but a tensor that was not moved to the device meets an
error as it would on a GPU, where none is at hand. An index out of range ends its context, so that nothing works on it
any more, and its memory may be limited. The device's type is ``meta``: the only one but the CPU that every PyTorch
knows.

With ``RAYFL_TEST_DEVICE=cuda`` the device is a real one.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rayfl.engine.precision import arithmetic

REAL = os.environ.get("RAYFL_TEST_DEVICE", "")
"""A real device that stands in for the pretended one; empty for none."""

PRETENDED = pytest.mark.skipif(bool(REAL), reason="needs a device that fails when it is told to")
_DEVICE = torch.device("meta")
_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_LOOKUPS = (
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.gather.default,
    _aten.embedding.default,
    _aten.nll_loss_forward.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_add.default,
    _aten.scatter_add_.default,
)


@dataclass
class Context:
    """What the device is to its process.

    Attributes:
        limit: bytes of its memory; None for no limit.
        lost: whether it answers every call with the error of one that has failed.
        live: bytes in use.
        most: the most of them at a time.
        made: how often memory was taken.
        failing: which of these times, counted from 0, there is too little.
    """

    limit: int | None = None
    lost: bool = False
    live: int = 0
    most: int = 0
    made: int = 0
    failing: range = range(0)
    _tensors: Counter[int] = field(default_factory=Counter)

    def check(self) -> None:
        """Raises what a call meets after an assertion has failed on the device."""
        if self.lost:
            raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")

    def admit(self, tensor: Elsewhere) -> None:
        """Counts the memory of a new tensor, which may be that of another one.

        Raises:
            OutOfMemoryError: when there is too little.
        """
        storage = tensor.here.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._tensors[place]:
            self.made += 1
            if (self.limit is not None and self.live + size > self.limit) or self.made - 1 in self.failing:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            self.live += size
            self.most = max(self.most, self.live)
        self._tensors[place] += 1
        weakref.finalize(tensor, self._left, place, size)

    def _left(self, place: int, size: int) -> None:
        self._tensors[place] -= 1
        if not self._tensors[place]:
            self.live -= size


_context = Context()


class Elsewhere(Tensor):
    """A tensor of the device; ``here`` has its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=_DEVICE,
        )
        made.here = here
        _context.admit(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """Also sees tensors that are here, and those that are made."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Products with vectors, in which PyTorch changes a shape in place, behind the back of a wrapper."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            left, right = args
            if left.dim() == right.dim() == 1:
                return (left * right).sum()
            if left.dim() == 1:
                return (left[None] @ right)[0]
            if right.dim() == 1:
                return (left @ right[:, None])[:, 0]
        if function is Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].cpu().tolist()
        return function(*args, **(kwargs or {}))


def _run(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = kwargs.get("device")
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    moves = there if device is None else torch.device(device).type == _DEVICE.type
    if function is _aten.copy_.default:
        moves = isinstance(args[0], Elsewhere)
    elif function not in _COPIES and there:
        _refuse_mixtures(function, args, tensors)
    generator = kwargs.get("generator")
    if moves and generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{function}: Expected a generator of the device, but found one of the CPU")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if there or moves:
        _context.check()
    try:
        found = function(*tree_map(_here, args), **tree_map(_here, kwargs))
    except (IndexError, RuntimeError) as error:
        if there and function in _LOOKUPS and "out of" in str(error):
            _context.lost = True
            _context.check()
        raise
    known = {id(_here(tensor)): tensor for tensor in tensors}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # What was given, changed in place, stays the same object.
        return known.get(id(value)) if id(value) in known else Elsewhere(value) if moves else value

    try:
        return tree_map(back, found)
    finally:
        known.clear()  # the traceback of an error holds what functions refer to


def _refuse_mixtures(function: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """As CUDA does: only scalars and indices may be on the CPU."""
    strange = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim()]
    if function in _INDEXING:
        strange = [tensor for tensor in strange if any(tensor is arg for arg in args)]
    if strange:
        shapes = [tuple(tensor.shape) for tensor in strange]
        raise RuntimeError(f"{function}: Expected all tensors to be on the same device, but those of {shapes} are not")


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Elsewhere) else value


def _moving(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For what makes tensors of this type without asking the dispatcher."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found = make(data, **options)
        return found if device is None else found.to(device)

    return made


@contextmanager
def elsewhere(memory: int | None = None) -> Iterator[torch.device]:
    """The pretended device; nothing of it may be used afterwards.

    Args:
        memory: bytes that it has; None for no limit.
    """
    if REAL:
        with arithmetic("float32"):
            yield torch.device(REAL)
        return
    tensor = torch.tensor

    def new_tensor(like: Tensor, data: Any) -> Tensor:
        return tensor(data, dtype=like.dtype).to(like.device)

    with ExitStack() as stack:
        stack.enter_context(_in_use(Context(memory)))
        stack.enter_context(mock.patch.object(torch, "tensor", _moving(tensor)))
        stack.enter_context(mock.patch.object(torch, "as_tensor", _moving(torch.as_tensor)))
        stack.enter_context(mock.patch.object(Tensor, "new_tensor", new_tensor))
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch())
        yield _DEVICE


@contextmanager
def _in_use(made: Context) -> Iterator[None]:
    global _context
    before, _context = _context, made
    try:
        yield
    finally:
        _context = before


def context() -> Context:
    """The context of the pretended device that is in use."""
    return _context
