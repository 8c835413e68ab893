"""Sparse models: how many elements each tensor keeps, which ones, and the message that has only these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree, map_leaves


def kept_shares(shapes: Mapping[str, Sequence[int]], density: float, by_size: bool) -> dict[str, float]:
    """Returns the share of its elements that each tensor keeps, so that all together keep ``density``.

    By size (Erdos-Renyi kernel, ERK) the shares are in proportion to (n_1 + ... + n_k) / (n_1 ... n_k) of a tensor of
    the shape (n_1, ..., n_k): small tensors keep more. One that would keep more than all is dense, and the others share
    what is left.

    Args:
        shapes: by name; a scalar counts as of the shape (1,).
        density: between 0 and 1.
        by_size: ERK; otherwise the share is the same for all.

    Source: Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners, ICML 2020.
    """
    if not by_size or density == 1:
        return dict.fromkeys(shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape or (1,)) / sizes[name] for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        others = [name for name in shapes if name not in dense]
        left = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = left / sum(raw[name] * sizes[name] for name in others)
        most = max(raw[name] for name in others)
        if scale * most <= 1:
            return {name: 1.0 if name in dense else scale * raw[name] for name in shapes}
        dense |= {name for name in others if raw[name] == most}


def kept_count(share: float, elements: int) -> int:
    """Returns how many elements a share of them is, rounded down."""
    return int(share * elements + 1e-9)  # a share of a sum may be a bit less than it should


def kept_counts(share: float, elements: Tensor) -> Tensor:
    """The same of each of several numbers, also of single precision, in which 0.53 of 100 is 52.999...

    Args:
        share: of each.
        elements: any shape.
    """
    return (share * elements + 1e-4).floor()


def drawn_masks(model: Mapping[str, Tensor], shares: Mapping[str, float], generator: np.random.Generator) -> Tree:
    """Returns which elements are kept, bool of the tensors' shapes, drawn at random.

    Args:
        model: the tensors.
        shares: of the elements that each keeps.
        generator: where the places come from.
    """
    found: Tree = {}
    for name, leaf in model.items():
        kept = torch.zeros(leaf.numel(), dtype=torch.bool)
        places = generator.permutation(leaf.numel())[: kept_count(shares[name], leaf.numel())]
        kept[torch.from_numpy(places)] = True
        found[name] = kept.view(leaf.shape).to(leaf.device)
    return found


def without_smallest(mask: Tensor, leaf: Tensor, count: int) -> Tensor:
    """Returns the mask without the kept elements of the least magnitude, of equal ones the first.

    Args:
        mask: bool.
        leaf: the values, of the same shape.
        count: how many to take out.
    """
    size = torch.where(mask, leaf.abs(), torch.inf).flatten()
    gone = size.argsort(stable=True)[:count]
    return mask.flatten().index_fill(0, gone, False).view(mask.shape)


def with_largest(mask: Tensor, merit: Tensor, count: int) -> Tensor:
    """Returns the mask with further elements: those with the largest values among the ones that it lacks.

    Args:
        mask: bool.
        merit: not negative, of the same shape.
        count: how many.
    """
    size = torch.where(mask, -1.0, merit).flatten()
    new = size.argsort(descending=True, stable=True)[:count]
    return mask.flatten().index_fill(0, new, True).view(mask.shape)


def inverted(masks: Tree) -> Tree:
    """The elements that are not in the masks."""
    return map_leaves(torch.logical_not, masks)


def masked(model: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tree:
    """Returns the model with zeros where a mask is False; tensors without a mask stay."""
    return {name: torch.where(masks[name], leaf, 0) if name in masks else leaf for name, leaf in model.items()}


def encoded(model: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tree:
    """Returns the message with the kept elements (``values``) and one bit for every element (``bits``).

    A tensor of which all elements are kept, or that has no mask, has no bits.

    Args:
        model: the tensors.
        masks: bool, of some of them.
    """
    values, bits = {}, {}
    for name, leaf in model.items():
        if name not in masks or bool(masks[name].all()):
            values[name] = leaf.clone()
            continue
        values[name] = leaf[masks[name]]
        bits[name] = torch.from_numpy(np.packbits(masks[name].flatten().cpu().numpy()))
    return {"values": values, "bits": bits}


def decoded(message: Tree, like: Mapping[str, Tensor]) -> tuple[Tree, Tree]:
    """Returns the model of a message, with zeros where nothing was kept, and its masks, of all of its tensors.

    Args:
        message: see :func:`encoded`.
        like: tensors of the same names, shapes and types.
    """
    model, masks = {}, {}
    for name, values in message["values"].items():
        shape, device = like[name].shape, values.device
        if name not in message["bits"]:
            model[name], masks[name] = values, torch.ones(shape, dtype=torch.bool, device=device)
            continue
        bits = np.unpackbits(message["bits"][name].cpu().numpy(), count=like[name].numel())
        masks[name] = torch.from_numpy(bits.astype(bool)).view(shape).to(device)
        model[name] = torch.zeros(shape, dtype=values.dtype, device=device).masked_scatter(masks[name], values)
    return model, masks
