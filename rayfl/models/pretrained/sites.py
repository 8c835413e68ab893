"""Frozen linear layers with a low-rank adapter of each client, and heads of each client: clients lie in the batch.

Sources: Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from rayfl.errors import ModelError

_NUMBERED = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


class Matrix(nn.Module):
    """Holds one matrix of each client.

    Args:
        rows: first length.
        columns: second length.
        trained: whether it requires a gradient.

    Attributes:
        weight: shape (N, rows, columns) when it is bound for N clients; (rows, columns) where all have the same.
    """

    def __init__(self, rows: int, columns: int, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=trained)


class Site(nn.Module):
    """A frozen linear layer W with a low-rank adapter of each client: W x + s B A x.

    Args:
        base: the layer, ``nn.Linear`` or the ``Conv1D`` of transformers.
        rank: r.
        scale: s.
        trains: which of ``a`` and ``b`` require a gradient.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float, trains: Collection[str]) -> None:
        super().__init__()
        outputs, inputs = shape_of(base)
        self.base, self.scale = base, scale
        self.lora_A = Matrix(rank, inputs, "a" in trains)
        self.lora_B = Matrix(outputs, rank, "b" in trains)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N b, ..., o) of inputs (N b, ..., i), of which the first b are the first client's."""
        y: Tensor = self.base(x)
        a, b = _stacked(self.lora_A.weight, self.lora_B.weight)
        rows = x.reshape(len(a), -1, x.shape[-1])
        low = torch.bmm(rows, a.to(x.dtype).mT)
        found = torch.baddbmm(y.reshape(len(a), -1, y.shape[-1]), low, b.to(x.dtype).mT, alpha=self.scale)
        return found.view(y.shape)


class TrainedLinear(nn.Module):
    """A linear layer of each client.

    Args:
        like: the layer whose shape it has.
        trained: whether it requires a gradient.
    """

    def __init__(self, like: nn.Module, trained: bool) -> None:
        super().__init__()
        outputs, inputs = shape_of(like)
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=trained)
        biased = getattr(like, "bias", None) is not None
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=trained) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N b, ..., o) of inputs (N b, ..., i), of which the first b are the first client's."""
        (weight,) = _stacked(self.weight)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        turned = weight.to(x.dtype).mT
        if self.bias is None:
            found = torch.bmm(rows, turned)
        else:
            bias = self.bias if self.bias.dim() == 2 else self.bias[None]
            found = torch.baddbmm(bias.to(x.dtype)[:, None], rows, turned)
        return found.view(*x.shape[:-1], -1)


class Head(TrainedLinear):
    """The last linear layer, which a transformer passes its features through unchanged; :meth:`outputs` applies it."""

    def forward(self, x: Tensor) -> Tensor:
        """The features themselves."""
        return x

    def outputs(self, features: Tensor) -> Tensor:
        """Returns what :class:`TrainedLinear` makes of features."""
        return super().forward(features)


def _stacked(*matrices: Tensor) -> list[Tensor]:
    """Matrices with a dimension of clients in front, as long as the longest."""
    whole = [matrix if matrix.dim() == 3 else matrix[None] for matrix in matrices]
    count = max(len(matrix) for matrix in whole)
    return [matrix.expand(count, -1, -1) for matrix in whole]


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (int(columns), int(rows)) if type(layer).__name__ == "Conv1D" else (int(rows), int(columns))


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module multiplies by one matrix."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def chosen(module: nn.Module, targets: Sequence[str], layers: Collection[int] | None, without: str) -> list[str]:
    """The names of the linear layers that get an adapter.

    Args:
        module: the model.
        targets: last parts of their names, or whole names.
        layers: numbers of the blocks; None for all.
        without: the module whose layers get none: the head.

    Raises:
        ModelError: a target names no linear layer, or a number no block; the message lists what there is.
    """
    linear = [name for name, one in module.named_modules() if is_linear(one) and not _within(name, without)]
    found: list[str] = []
    for target in targets:
        own = [name for name in linear if _within_end(name, target)]
        if not own:
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(f"model.adapter.targets: no linear layer is called {target!r}; there are {there}")
        found += own
    numbers = {name: int(match[1]) if (match := _NUMBERED.search(name)) else None for name in found}
    if layers is not None:
        if missing := sorted(set(layers) - {number for number in numbers.values() if number is not None}):
            there = sorted({number for number in numbers.values() if number is not None})
            raise ModelError(f"model.adapter.layers: no targets are in the blocks {missing}; there are {there}")
        found = [name for name in found if numbers[name] in layers]
    return [name for name in linear if name in found]


def replace(module: nn.Module, name: str, by: nn.Module) -> None:
    """Puts a module in the place of another one."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, by)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _within_end(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
