"""Counts what a program asks of the pretended device: launches of kernels, transfers, and waiting for results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.elsewhere import Elsewhere

_VIEWS = """view t transpose expand slice select unsqueeze squeeze detach alias as_strided split split_with_sizes unbind
permute _unsafe_view _reshape_alias lift_fresh empty empty_like new_empty empty_strided new_empty_strided diagonal
unfold unflatten chunk movedim set_ detach_ resize_ is_same_size"""
_WAITS = "_local_scalar_dense item is_nonzero nonzero masked_select _unique2 equal"
_NO_LAUNCH, _WAITING = frozenset(_VIEWS.split()), frozenset(_WAITS.split())


class Launches(TorchDispatchMode):
    """Counts, while it is on.

    Attributes:
        launches: by name, operations on the device that are no views.
        waits: by name, what the host waits for: results of operations, and transfers to and from the device.
        bytes: by name, bytes of the arrays that operations read and wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._schema.name.partition("::")[2]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, Elsewhere) for tensor in read)
        device = kwargs.get("device")
        makes = device is not None and torch.device(device).type == "meta"
        if name in _WAITING and there:
            self.waits[name] += 1
        elif name == "_to_copy" and makes and not there and kwargs.get("non_blocking"):
            self.launches["to device"] += 1  # from pinned memory, on a GPU
        elif name == "_to_copy" and device is not None and makes != there:
            self.waits["to device" if makes else "from device"] += 1
        elif name == "copy_" and isinstance(args[0], Elsewhere) != isinstance(args[1], Elsewhere):
            self.waits["to device" if isinstance(args[0], Elsewhere) else "from device"] += 1
        elif (there or makes) and name not in _NO_LAUNCH:
            self.launches[name] += 1
        found = function(*args, **kwargs)
        if (there or makes) and name not in _NO_LAUNCH:
            given = {key: value for key, value in kwargs.items() if key not in ("out", "grad_input")}
            read = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
            written = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            if name.endswith("_"):
                written = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            for tensors in (read, written):
                self.bytes[name] += sum(_bytes(tensor) for tensor in {id(one): one for one in tensors}.values())
        return found


def _bytes(tensor: Tensor) -> int:
    """Bytes of the different elements of a tensor."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1)
    return int(torch.Size(sizes).numel()) * tensor.element_size()
