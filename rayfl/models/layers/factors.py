"""Linear layers and convolutions whose weights are composed of low-rank factors each time they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rayfl.models.classification import ClassificationModel

Composition = Literal["fedpara", "pfedpara", "low_rank"]
Layers = Literal["all", "hidden", "convolutions"]

_ROUNDING = 1e-9
"""So that a rank of 12.000000001 is 12."""
FIRST, SECOND = (tuple(f"weight_{factor}{which}" for factor in "xyt") for which in (1, 2))
"""Names of the factors of W1 and of W2 in their layer."""


class Factorized(nn.Module):
    """A layer of PyTorch's whose weight, shape (m, n, *kernel), is a function of factors.

        fedpara    W = W1 * W2          of up to rank R^2
        pfedpara   W = W1 * (W2 + 1)
        low_rank   W = W1

    Products are by element. W1 = X1 Y1^T with X1 (m, R) and Y1 (n, R), and W2 in the same way. The W1 of a convolution
    of more than one pixel has a core T1 (R, R, *kernel) too: at each place of the kernel it is X1 T1 Y1^T.

    Attributes:
        composition: which of the three.

    Source: Hyeon-Woo, Ye-Bin, Oh: FedPara, ICLR 2022, Proposition 1 (matrices), Proposition 3 (convolutions without
    reshaping) and the section on pFedPara.
    """

    composition: Composition

    @property
    def weight(self) -> Tensor:
        """The composed weight, shape (m, n, *kernel)."""
        first = self._product(FIRST)
        if self.composition == "low_rank":
            return first
        second = self._product(SECOND)
        return first * (second + 1) if self.composition == "pfedpara" else first * second

    def _product(self, names: Sequence[str]) -> Tensor:
        x, y, core = (self._parameters.get(name) for name in names)
        assert x is not None
        assert y is not None
        if core is not None:
            by_pixel = torch.einsum("abk,oa,ib->oik", core.flatten(2), x, y)
            return by_pixel.reshape(*by_pixel.shape[:2], *core.shape[2:])
        matrix = x @ y.mT
        # a convolution of one pixel is a linear layer of channels
        return matrix.reshape(*matrix.shape, *[1] * self._pixel_axes)

    @property
    def _pixel_axes(self) -> int:
        return len(getattr(self, "kernel_size", ()))


class FactorizedLinear(Factorized, nn.Linear):  # type: ignore[override]
    """A linear layer."""


class FactorizedConv1d(Factorized, nn.Conv1d):  # type: ignore[override]
    """A convolution of sequences."""


class FactorizedConv2d(Factorized, nn.Conv2d):  # type: ignore[override]
    """A convolution of images."""


class FactorizedConv3d(Factorized, nn.Conv3d):  # type: ignore[override]
    """A convolution of volumes."""


_FORMS: dict[type[nn.Module], type[Factorized]] = {
    nn.Linear: FactorizedLinear,
    nn.Conv1d: FactorizedConv1d,
    nn.Conv2d: FactorizedConv2d,
    nn.Conv3d: FactorizedConv3d,
}


def rank_of(shape: Sequence[int], gamma: float) -> int | None:
    """Returns R of a weight, (1 - gamma) r_min + gamma r_max, rounded up; None where no factors are smaller than it.

    Args:
        shape: of the weight, (m, n, *kernel).
        gamma: between 0 and 1. At 0 the rank is r_min = ceil(sqrt(min(m, n))), the least with which W1 * W2 may have
            full rank; at 1 it is r_max, the largest with which the factors have fewer numbers than the weight.
    """
    least = math.isqrt(min(shape[:2]) - 1) + 1
    most = _largest_rank(shape, 2, math.prod(shape) - 1)
    return None if most < least else math.ceil((1 - gamma) * least + gamma * most - _ROUNDING)


def size_of(shape: Sequence[int], rank: int, products: int) -> int:
    """Returns how many numbers the factors of a weight are.

    Args:
        shape: of the weight, (m, n, *kernel).
        rank: R.
        products: how many products of factors there are, one or two.
    """
    pixels = math.prod(shape[2:])
    return products * (rank * (shape[0] + shape[1]) + (rank**2 * pixels if pixels > 1 else 0))


def _largest_rank(shape: Sequence[int], products: int, size: int) -> int:
    """Returns the largest rank with which factors are at most ``size`` numbers."""
    rank = 0
    while size_of(shape, rank + 1, products) <= size:
        rank += 1
    return rank


def factorize(model: ClassificationModel, composition: Composition, gamma: float, layers: Layers) -> int:
    """Replaces weights of a model's layers by drawn factors, in place.

    Layers of other kinds stay as they are, and so do those with groups of channels, those whose weight is fixed or has
    a further place in the model, and those of which no factors are smaller.

    Factors are drawn from PyTorch's generator, all of a product's with one standard deviation and mean 0, such that the
    composed weight has the mean square of the weight that it replaces (2 / fan-in, if that weight is 0).

    Args:
        model: with its initial values.
        composition: see :class:`Factorized`. A low-rank weight has the largest rank with which its factors are no more
            numbers than fedpara's are; for a matrix this is 2 R.
        gamma: see :func:`rank_of`.
        layers: ``all``; ``hidden``, all but the head; ``convolutions``, these alone.

    Returns:
        How many layers have factors now.
    """
    names = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    head = model.get_submodule(model.head_module)
    found = 0
    for module in model.modules():
        kind = _FORMS.get(type(module))
        left_out = (layers != "all" and module is head) or (layers == "convolutions" and kind is FactorizedLinear)
        if kind is None or left_out or getattr(module, "groups", 1) > 1:
            continue
        weight: Any = module.weight
        rank = rank_of(weight.shape, gamma)
        if rank is None or not weight.requires_grad or names.count(id(weight)) > 1:
            continue
        _replace_weight(module, kind, composition, rank)
        found += 1
    return found


def _replace_weight(module: nn.Module, kind: type[Factorized], composition: Composition, rank: int) -> None:
    weight, bias = (module._parameters.pop(name) for name in ("weight", "bias"))
    assert weight is not None
    sides, kernel = weight.shape[:2], weight.shape[2:]
    products = (FIRST,) if composition == "low_rank" else (FIRST, SECOND)
    if composition == "low_rank":
        rank = _largest_rank(weight.shape, 1, size_of(weight.shape, rank, 2))
    module.__class__ = kind
    vars(module)["composition"] = composition
    square = float(weight.detach().square().mean()) or 2 / weight[0].numel()
    core = math.prod(kernel) > 1
    squares = _squares_of_products(square, composition)
    for (x, y, t), own in zip(products, squares, strict=True):
        spread = _spread(own, rank, core)
        shapes = {x: (sides[0], rank), y: (sides[1], rank), **({t: (rank, rank, *kernel)} if core else {})}
        for name, shape in shapes.items():
            module.register_parameter(name, nn.Parameter(weight.new_empty(shape).normal_(0, spread)))
    module.register_parameter("bias", bias)


def _squares_of_products(square: float, composition: Composition) -> tuple[float, ...]:
    """Returns the mean squares of W1 and of W2 with which W has a given one; both have mean 0.

    In W1 * (W2 + 1) many W2 would do: it has what it has in W1 * W2, so that its factors are not too small to learn.
    """
    if composition == "low_rank":
        return (square,)
    second = math.sqrt(square)
    return (second if composition == "fedpara" else square / (1 + second)), second


def _spread(square: float, rank: int, core: bool) -> float:
    """Returns the standard deviation of factors whose product has a given mean square."""
    return float((square / rank**2) ** (1 / 6)) if core else float((square / rank) ** (1 / 4))
