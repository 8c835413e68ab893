"""A pretended accelerator: tensors that say they are elsewhere, and refuse what a GPU refuses.

What runs under :func:`elsewhere` computes on this processor, but a tensor that was not moved to the device meets an
error as it would on a GPU, where none is at hand. The device's type is ``meta``: besides the CPU the only one that
every PyTorch knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_DEVICE = torch.device("meta")
_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


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
    found = function(*tree_map(_here, args), **tree_map(_here, kwargs))
    known = {id(_here(tensor)): tensor for tensor in tensors}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # What was given, changed in place, stays the same object.
        return known.get(id(value)) if id(value) in known else Elsewhere(value) if moves else value

    return tree_map(back, found)


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
def elsewhere() -> Iterator[torch.device]:
    """The pretended device; nothing of it may be used afterwards."""
    tensor = torch.tensor

    def new_tensor(like: Tensor, data: Any) -> Tensor:
        return tensor(data, dtype=like.dtype).to(like.device)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", _moving(tensor)))
        stack.enter_context(mock.patch.object(torch, "as_tensor", _moving(torch.as_tensor)))
        stack.enter_context(mock.patch.object(Tensor, "new_tensor", new_tensor))
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch())
        yield _DEVICE
