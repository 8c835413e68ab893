"""Frozen linear layers with a low-rank adapter of each client, and heads of each client: clients lie in the batch.

Several adapters of a client may lie side by side in a layer (:mod:`rayfl.models.pretrained.mixing`), m of them with
their ranks one after the other. Then each has a share of every sample or of every row of it. A matrix of the layer's
size may be added to the frozen one.

Sources: Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.models.pretrained.magnitudes import adapted_norms, rescaled

ALL_LINEAR = "all-linear"
"""Stands for all linear layers but those that make the outputs."""

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


class Mixed(nn.Module):
    """A layer in which several adapters, or heads, of a client may lie side by side.

    Attributes:
        shares: how much of each counts, shape (N, b, m), or (N, 1, m) where all samples have the same; None for one
            adapter, which counts whole.
    """

    shares: Tensor | None = None

    def _of_rows(self, clients: int, rows: int) -> Tensor | None:
        """The shares of every row, shape (clients, rows, m); None where there are none."""
        if self.shares is None:
            return None
        shares = self.shares.expand(clients, -1, -1)
        return shares.repeat_interleave(rows // shares.shape[1], 1)


class Site(Mixed):
    """A frozen linear layer W with a low-rank adapter of each client: W x + s B A x.

    With several adapters it is W x + s sum_m p_m B_m A_m x. The shares p are those of the sample, or softmax(G x) of
    the row where a mixer G (m, i) is bound. With magnitudes, of one adapter alone, it is what
    :mod:`rayfl.models.pretrained.magnitudes` says.

    Args:
        base: the layer, ``nn.Linear`` or the ``Conv1D`` of transformers.
        rank: r.
        scale: s.
        trains: which of ``a`` and ``b`` require a gradient.
        decomposed: whether outputs have magnitudes, which require a gradient.

    Attributes:
        lora_magnitude_vector: the magnitudes, shape (N, o) when they are bound for N clients; None without.
        norms: those of the rows of W, shape (o,), where there are magnitudes; None before W is bound.
        mixer: G of each client, shape (N, m, i); None where shares do not depend on the row.
        delta: what is added to W, shape (N, o, i), in whose first dimension all may be one; None for nothing.
    """

    mixer: Tensor | None = None
    delta: Tensor | None = None
    norms: Tensor | None = None

    def __init__(
        self, base: nn.Module, rank: int, scale: float, trains: Collection[str], decomposed: bool = False
    ) -> None:
        super().__init__()
        outputs, inputs = shape_of(base)
        self.base, self.scale = base, scale
        self.lora_A = Matrix(rank, inputs, "a" in trains)
        self.lora_B = Matrix(outputs, rank, "b" in trains)
        self.lora_magnitude_vector = nn.Parameter(torch.empty(outputs)) if decomposed else None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N b, ..., o) of inputs (N b, ..., i), of which the first b are the first client's."""
        y: Tensor = self.base(x)
        a, b = _stacked(self.lora_A.weight, self.lora_B.weight)
        rows = x.reshape(len(a), -1, x.shape[-1])
        low = torch.bmm(rows, a.to(x.dtype).mT)
        shares = self._of_rows(*rows.shape[:2])
        if self.mixer is not None:
            (mixer,) = _stacked(self.mixer)
            shares = torch.bmm(rows.float(), mixer.float().mT).softmax(-1)
        if shares is not None:
            low, b = _shared(low, b, shares.to(x.dtype))
        outputs = y.reshape(len(a), -1, y.shape[-1])
        if self.delta is not None:
            outputs = outputs + _added(rows, self.delta)
        found = torch.baddbmm(outputs, low, b.to(x.dtype).mT, alpha=self.scale)
        if self.lora_magnitude_vector is not None:
            assert self.norms is not None
            # one factor that all clients have goes through W once
            a, b = (one if one.dim() == 3 else one[None] for one in (self.lora_A.weight, self.lora_B.weight))
            norms = adapted_norms(matrix_of(self.base), self.norms, a, b, self.scale)
            bias: Tensor | None = getattr(self.base, "bias", None)
            found = rescaled(found, bias, self.lora_magnitude_vector, norms)
        return found.view(y.shape)


class TrainedLinear(Mixed):
    """A linear layer of each client; of several side by side, the sum of their outputs times their shares.

    Args:
        like: the layer whose shape it has.
        trained: whether it requires a gradient.
    """

    def __init__(self, like: nn.Module, trained: bool) -> None:
        super().__init__()
        outputs, inputs = shape_of(like)
        self._outputs = outputs
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
        shares = self._of_rows(*rows.shape[:2])
        if shares is not None and found.shape[-1] != self._outputs:
            parts = found.view(*found.shape[:-1], shares.shape[-1], self._outputs)
            found = (parts * shares.to(x.dtype)[..., None]).sum(-2)
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


def _added(rows: Tensor, delta: Tensor) -> Tensor:
    """What matrices of shape (N, o, i) make of rows (N, rows, i); one product where they are all the same."""
    if len(delta) == 1 or not delta.stride(0):
        return F.linear(rows, delta[0].to(rows.dtype))
    return torch.bmm(rows, delta.to(rows.dtype).mT)


def _shared(low: Tensor, b: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """What adapters side by side make of rows, times their shares, and their second factors.

    Args:
        low: A x of all, shape (N, rows, m r), or (N, rows, r) where they have one A.
        b: their B, shape (N, o, m r), or (N, o, r) where they have one B.
        shares: shape (N, rows, m).
    """
    count = shares.shape[-1]
    rank = max(low.shape[-1], b.shape[-1]) // count
    low = low if low.shape[-1] == count * rank else low.repeat(1, 1, count)
    b = b if b.shape[-1] == count * rank else b.repeat(1, 1, count)
    return low * shares.repeat_interleave(rank, -1), b


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (int(columns), int(rows)) if is_transposed(layer) else (int(rows), int(columns))


def matrix_of(layer: nn.Module) -> Tensor:
    """The matrix of a linear layer, outputs by inputs."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.mT if is_transposed(layer) else weight


def is_transposed(layer: nn.Module) -> bool:
    """Returns whether a linear layer holds a matrix of inputs by outputs: the ``Conv1D`` of transformers."""
    return type(layer).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module multiplies by one matrix."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def chosen(
    module: nn.Module,
    targets: str | Sequence[str],
    layers: Collection[int] | None,
    without: str,
    option: str = "model.adapter.targets",
) -> list[str]:
    """The names of the linear layers that get an adapter.

    Args:
        module: the model.
        targets: last parts of their names, or whole names; :data:`ALL_LINEAR`; or a regular expression that whole names
            match. All three are what ``target_modules`` of ``peft`` means.
        layers: numbers of the blocks; None for all.
        without: the module whose layers get none: the head.
        option: what gives the targets, for messages.

    Raises:
        ModelError: a target names no linear layer, or a number no block; the message lists what there is.
    """
    linear = [name for name, one in module.named_modules() if is_linear(one) and not _within(name, without)]
    found: list[str] = []
    if targets == ALL_LINEAR:
        found = linear
    elif isinstance(targets, str):
        found = [name for name in linear if re.fullmatch(targets, name)]
        if not found:
            some = ", ".join(linear[:3])
            raise ModelError(f"{option}: no linear layer matches {targets!r} as a whole; some are {some}")
    else:
        for target in targets:
            own = [name for name in linear if _within_end(name, target)]
            if not own:
                there = sorted({name.rpartition(".")[2] for name in linear})
                raise ModelError(
                    f"{option}: no linear layer is called {target!r}; there are {there}. A text in place "
                    f"of a list is {ALL_LINEAR}, or a regular expression"
                )
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
