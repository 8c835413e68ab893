"""Stacked gradients compiled by Inductor: traced once for each shape, and run without autograd and ``vmap``."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from rayfl.errors import ConfigError, text_of

_log = logging.getLogger(__name__)
_KEPT = 64
_NO_LAUNCH = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)

Work = Callable[..., list[Tensor]]
"""A function of trees of tensors."""

Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
"""Makes a function of a trace, given inputs like those that it is for."""


def inductor(trace: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """PyTorch's compiler."""
    from torch._inductor import compile as compiled  # takes seconds to import

    found: Callable[..., Sequence[Tensor]] = compiled(trace, list(inputs))
    return found


def check_compiler(device: torch.device) -> None:
    """Makes sure that Inductor finds what it needs.

    Raises:
        ConfigError: a compiler is missing; the message says which.
    """
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError("engine.compile=true needs Triton on GPUs: pip install triton, or engine.compile=false")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ConfigError(
            "engine.compile=true needs a C++ compiler: install g++ (or name one in the variable CXX), or "
            "engine.compile=false"
        ) from error


class Compiler:
    """Runs work by its compiled traces; the last 64 are kept.

    Args:
        backend: makes functions of traces.
    """

    def __init__(self, backend: Backend = inductor) -> None:
        self._backend = backend
        self._made: OrderedDict[Any, Callable[..., Sequence[Tensor]] | None] = OrderedDict()
        self._said: set[str] = set()

    def run(self, name: str, identity: Any, work: Work, arguments: tuple[Any, ...]) -> list[Tensor]:
        """The results of the work.

        Work that cannot be traced or compiled is run as it is, and the log names it once.

        Args:
            name: for the log.
            identity: equal for work that does the same; hashable.
            work: reads nothing but its arguments and what stays; may write to tensors among them.
            arguments: trees of tensors and plain values.
        """
        flat, spec = tree_flatten(arguments)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in flat)
        shapes = tuple((one.shape, one.stride(), one.dtype, one.device) for one in tensors)
        key = identity, str(spec), plain, shapes
        if key not in self._made:

            def on_tensors(*given: Tensor) -> list[Tensor]:
                rest = iter(given)
                leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in flat]
                return work(*tree_unflatten(leaves, spec))

            self._made[key] = self._compiled(name, on_tensors, tensors)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        made = self._made[key]
        if made is None:
            return work(*arguments)
        with torch.no_grad():
            return list(made(*tensors))

    def _compiled(self, name: str, work: Work, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]] | None:
        start = time.perf_counter()
        try:
            # On copies: tracing runs the work, which may write to what it is given.
            trace = make_fx(work)(*[tensor.clone() for tensor in tensors])
            made = self._backend(_bare(trace), [tensor.clone() for tensor in tensors])
        except Exception as error:
            reason = (text_of(error).strip().splitlines() or [type(error).__name__])[0]
            if name not in self._said:
                self._said.add(name)
                _log.warning("%s cannot be compiled and runs as it is: %s", name, reason)
            return None
        _log.info("compiled %s for stacks of %d in %.1f s", name, len(tensors[0]), time.perf_counter() - start)
        return made


def _bare(trace: GraphModule) -> GraphModule:
    """The trace without operations that only matter to autograd."""
    for node in list(trace.graph.nodes):
        if node.op == "call_function" and node.target in _NO_LAUNCH:
            node.replace_all_uses_with(node.args[0])
            trace.graph.erase_node(node)
    trace.recompile()
    return trace
