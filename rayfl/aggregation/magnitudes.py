"""The extreme entries of trees: whether all are finite, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves

_SMALL = 4096
"""Elements of a tensor on a CPU for which a call takes longer than the look that it asks for."""
Extremes = Mapping[int, tuple[float, float]]
"""Bounds of the entries of tensors, by ``id``: one is the entry of largest magnitude, or its opposite."""


class NonFiniteError(ValueError):
    """A tree holds NaN or infinity; ``path`` names the leaf."""

    def __init__(self, path: str) -> None:
        super().__init__(f"non-finite values in {path!r}")
        self.path = path


def extremes_of(trees: Sequence[Mapping[str, Any]]) -> Extremes:
    """The extremes of all tensors on accelerators, which are waited for once, and of small ones on CPUs."""
    found = [leaf for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    floats = [leaf for leaf in found if leaf.is_floating_point() and leaf.numel()]
    there = [leaf for leaf in floats if leaf.device.type != "cpu"]
    known = dict(zip(map(id, there), ((-most, most) for most in _magnitudes(there)), strict=True))
    alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for leaf in floats:
        if leaf.device.type == "cpu" and leaf.numel() <= _SMALL:
            alike.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    for group in alike.values():
        rows = torch.stack([leaf.detach() for leaf in group]).view(len(group), -1)
        # Two passes: aminmax of rows takes a hundred times as long.
        known |= zip(map(id, group), zip(rows.amin(1).tolist(), rows.amax(1).tolist(), strict=True), strict=True)
    return known


@torch.no_grad()
def _magnitudes(found: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor on an accelerator: few launches and one transfer for all."""
    alike: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(found):
        alike.setdefault(leaf.dtype, []).append(place)
    norms: dict[int, Tensor] = {}
    for places in alike.values():
        norms |= zip(places, torch._foreach_norm([found[i] for i in places], torch.inf), strict=True)
    return _numbers([norms[place] for place in range(len(found))])


def check_finite(tree: Mapping[str, Any], known: Extremes | None = None) -> None:
    """Raises NonFiniteError for the first leaf with NaN or infinity; ``known`` spares to look at leaves."""
    largest(tree, known)


def largest(tree: Mapping[str, Any], known: Extremes | None = None) -> float:
    """The largest magnitude of all leaves; ``known`` spares to look at leaves.

    Raises:
        NonFiniteError: for the first leaf with NaN or infinity.
        TypeError: for the first leaf that is neither a tensor nor a number.
    """
    most = 0.0
    for path, leaf in leaves(tree):
        bounds = known.get(id(leaf)) if known else None
        if bounds is None:
            return _looked_at(tree, known or {})
        low, high = bounds
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(path)
        most = max(most, -low, high)
    return most


def _looked_at(tree: Mapping[str, Any], known: Extremes) -> float:
    """Returns the largest magnitude of a tree with leaves that were not scanned yet."""
    paths: list[str] = []
    bounds: list[Any] = []
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.numel():
            continue
        paths.append(path)
        if id(leaf) in known:
            bounds += known[id(leaf)]
        else:
            bounds += leaf.detach().aminmax() if isinstance(leaf, Tensor) else (_number(path, leaf),) * 2
    numbers, most = _numbers(bounds), 0.0
    for path, low, high in zip(paths, numbers[::2], numbers[1::2], strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(path)
        most = max(most, abs(low), abs(high))
    return most


def _number(path: str, leaf: Any) -> float:
    try:
        return float(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{path!r} is of type {type(leaf).__name__}, not a tensor or a number ({error})") from None


def _numbers(scalars: Sequence[Any]) -> list[float]:
    """Returns scalars as numbers; those of an accelerator in one transfer, since each one synchronizes."""
    there = [i for i, one in enumerate(scalars) if isinstance(one, Tensor) and one.device.type != "cpu"]
    brought = torch.stack([scalars[i] for i in there]).cpu().tolist() if there else []
    found = dict(zip(there, brought, strict=True))
    return [found[i] if i in found else float(one) for i, one in enumerate(scalars)]
