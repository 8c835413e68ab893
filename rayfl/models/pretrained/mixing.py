"""Several models of one adapted network side by side, as one tree: each has a share of what they add to the base.

The factors of m adapters of rank r are those of one adapter of rank m r, so that such a tree goes through the network
like any other, alone or stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SHARES = "shares"
"""Name of the shares in a tree."""
_MIXER = ".mixer"


def mixer_name(site: str) -> str:
    """Name of a layer's mixer in a tree."""
    return f"{site}{_MIXER}"


def side_by_side(models: Sequence[Mapping[str, Tensor]], shares: Tensor) -> dict[str, Tensor]:
    """Models whose adapters, and heads, count by their shares: W x + s sum_m p_m B_m A_m x, sum_m p_m (V_m x + c_m).

    Args:
        models: m trees of one network.
        shares: p, shape (b, m) for a batch of b samples; (1, m) where all samples have the same.
    """
    return {**_joined(models), SHARES: shares}


def mixed_by_rows(
    own: Mapping[str, Tensor], other: Mapping[str, Tensor], mixers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A model with a second adapter: in every layer, each row x has the shares softmax(G x) of the two.

    Args:
        own: the model.
        other: the second adapter; it may lack a head, and what it has of one is not used.
        mixers: G by layer, shape (2, i).
    """
    adapters = [{name: tree[name] for name in tree if _is_factor(name)} for tree in (own, other)]
    return {**own, **_joined(adapters), **{mixer_name(site): mixer for site, mixer in mixers.items()}}


def _joined(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors with those of all models one after the other: along the rank, or along a head's outputs."""
    return {
        name: torch.cat([model[name] for model in models], 1 if name.endswith(".lora_B.weight") else 0)
        for name in models[0]
    }


def _is_factor(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))
