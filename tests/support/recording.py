"""Stands in for CUDA graphs where no GPU is: records operations with the memory that they use, and replays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = frozenset(
    ["_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "_pin_memory"]
)
_DRAWS = frozenset(
    ["bernoulli", "bernoulli_", "rand", "randn", "randint", "uniform_", "normal_", "native_dropout", "random_"]
)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Operations(TorchDispatchMode):
    """Notes operations, and what they are about to write that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name.partition("::")[2], kwargs or {}
        if name in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name in _DRAWS:
            raise RuntimeError(f"offset increment outside graph capture encountered unexpectedly: {name}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_memory(tensor) for tensor in given}
        arguments = {a.name: a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments}
        if name == "native_batch_norm":  # which writes to running statistics without saying so
            arguments |= {"running_mean": True, "running_var": True}
        bound = {**dict(zip(arguments, args, strict=False)), **kwargs}
        for name in (name for name, written in arguments.items() if written and name in bound):
            for tensor in (leaf for leaf in tree_leaves(bound[name]) if isinstance(leaf, Tensor)):
                if _memory(tensor) not in self._made and id(tensor) not in self.before:
                    self.before[id(tensor)] = tensor, tensor.clone()
        made = function(*args, **kwargs)
        self._made |= {_memory(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)} - known
        self.found.append((function, args, kwargs, made))
        return made

    @torch.no_grad()
    def undo(self) -> None:
        """Puts what was written back to what it was."""
        for tensor, value in reversed(self.before.values()):
            tensor.detach().copy_(value)

    def persistent(self) -> list[tuple[str, list[int | None]]]:
        """By operation, the addresses of what it is given that was there before."""
        return [
            (
                function._schema.name,
                [
                    leaf.data_ptr() if _memory(leaf) not in self._made else None
                    for leaf in tree_leaves((args, kwargs))
                    if isinstance(leaf, Tensor)
                ],
            )
            for function, args, kwargs, _ in self.found
        ]


class Recording:
    """Records work, refuses what a CUDA graph refuses, and replays the operations on the memory of the recording.

    It sees that two steps on are the same operations on the same memory.

    Attributes:
        launched: how often work was run for itself.
        recorded: by recording, how many operations it has.
        replayed: how many replays there were.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.recorded: list[int] = []
        self.replayed = 0

    def warm(self, work: Callable[[], None]) -> None:
        self.launched += 1
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        runs = []
        for _ in range(3):  # every other step may use its memory in turn
            operations = _Operations()
            try:
                with operations:
                    work()
            finally:
                operations.undo()
            runs.append(operations)
        return self._checked(runs[0], runs[2])

    def _checked(self, first: _Operations, second: _Operations) -> Callable[[], None]:
        for one, other in zip(first.persistent(), second.persistent(), strict=True):
            assert one == other, "another operation, or other memory, than in the step before"
        self.recorded.append(len(second.found))

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for function, args, kwargs, made in second.found:
                    again = function(*args, **kwargs)
                    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                        if isinstance(old, Tensor) and _memory(old) != _memory(new):
                            old.copy_(new)

        return replay
