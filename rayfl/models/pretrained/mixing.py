"""Several models of one adapted network side by side, as one tree: each has a share of what they add to the base.

The factors of m adapters of rank r are those of one adapter of rank m r, so that such a tree goes through the network
like any other, alone or stacked. A tree may also have a matrix D of a layer's size, which is added to the layer's own:
(W + D) x + s B A x. What is the same for all clients of a stack is multiplied once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rayfl.errors import ModelError
from rayfl.models.pretrained.feature_adapter import OF_FEATURES
from rayfl.models.pretrained.magnitudes import refuse_magnitudes
from rayfl.models.pretrained.prompts import PROMPTS
from rayfl.models.pretrained.rescaling import FACTORS
from rayfl.models.pretrained.text_head import CONTEXT

SHARES = "shares"
"""Name of the shares in a tree."""
_MIXER, _DELTA = ".mixer", ".delta"
_A, _B = ".lora_A.weight", ".lora_B.weight"


def is_mixed_by_rows(model: Mapping[str, Tensor]) -> bool:
    """Returns whether the shares of a model's adapters differ from row to row."""
    return any(name.endswith(_MIXER) for name in model)


def mixer_name(site: str) -> str:
    """Name of a layer's mixer in a tree."""
    return f"{site}{_MIXER}"


def delta_name(site: str) -> str:
    """Name, in a tree, of a matrix that is added to a layer's own."""
    return f"{site}{_DELTA}"


def is_delta(name: str) -> bool:
    """Returns whether a tensor of a tree is a matrix that is added to a layer's own."""
    return name.endswith(_DELTA)


def refuse_other_kinds(names: Iterable[str], what: str) -> None:
    """Raises ModelError where a model's adapters are not of low rank, or have magnitudes.

    Args:
        names: of the model's tensors.
        what: is done with adapters, the subject of the message.
    """
    known = tuple(names)
    refuse_magnitudes(known, what)
    if any(name.startswith((PROMPTS, OF_FEATURES)) or name.endswith(FACTORS) for name in known):
        raise ModelError(f"{what} supposes that adapters add s B A to their layers: set model.adapter.name=lora")


def side_by_side(models: Sequence[Mapping[str, Tensor]], shares: Tensor) -> dict[str, Tensor]:
    """Models whose adapters, and heads, count by their shares: W x + s sum_m p_m B_m A_m x, sum_m p_m (V_m x + c_m).

    Args:
        models: m trees of one network.
        shares: p, shape (b, m) for a batch of b samples; (1, m) where all samples have the same.

    Raises:
        ModelError: adapters are of another kind, or have magnitudes; or a context of texts is trained.
    """
    refuse_other_kinds(models[0], "side_by_side")
    if CONTEXT in models[0]:
        raise ModelError("side_by_side supposes that heads are linear layers, and not made of texts with a context")
    return {**_joined(models), SHARES: shares}


def mixed_by_rows(
    own: Mapping[str, Tensor], other: Mapping[str, Tensor], mixers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A model with a second adapter: in every layer, each row x has the shares softmax(G x) of the two.

    Args:
        own: the model.
        other: the second adapter; it may lack a head, and what it has of one is not used.
        mixers: G by layer, shape (2, i).

    Raises:
        ModelError: adapters are of another kind, or have magnitudes.
    """
    refuse_other_kinds(own, "mixed_by_rows")
    adapters = [{name: tree[name] for name in tree if _is_factor(name)} for tree in (own, other)]
    return {**own, **_joined(adapters), **{mixer_name(site): mixer for site, mixer in mixers.items()}}


def blended(
    models: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Sequence[Tensor | float]]
) -> dict[str, Tensor]:
    """One model that adds to the base what several models add, times their weights: s sum_m p_m B_m A_m, rank m r.

    Unlike a sum of factors it is linear in what the models add. Heads are summed with the same weights.

    Args:
        models: m trees of one network, with both factors of every adapter.
        weights: p_1, ..., p_m by name of a tensor; those of the two factors of a layer must be the same.

    Raises:
        ModelError: adapters are of another kind, or have magnitudes.
    """
    refuse_other_kinds(models[0], "blended")
    found = {}
    for name in models[0]:
        parts = [model[name] for model in models]
        if name.endswith(_A):
            found[name] = torch.cat(parts)
            continue
        weighted = [weight * part for weight, part in zip(weights[name], parts, strict=True)]
        found[name] = torch.cat(weighted, 1) if name.endswith(_B) else torch.stack(weighted).sum(0)
    return found


def at_point(endpoints: Mapping[str, Tensor], point: Sequence[Tensor | float] | Tensor) -> dict[str, Tensor]:
    """The point of a simplex of adapters: the model that adds sum_m p_m s B_m A_m to the base.

    Args:
        endpoints: tensors of shape (m, ...), the endpoints' one after the other.
        point: p, m numbers.
    """
    vertices = [{name: leaf[m] for name, leaf in endpoints.items()} for m in range(len(point))]
    return blended(vertices, dict.fromkeys(endpoints, tuple(point)))


def update_product(one: Mapping[str, Tensor], other: Mapping[str, Tensor], scale: float) -> Tensor:
    """The inner product of what two models add to the base, over all layers and the head: a scalar.

    <s B A, s B' A'> is the sum of all entries of s^2 (B^T B') * (A A'^T), which needs no matrix of the layer's size. It
    is the same for (B, A) and (B Q^-1, Q A), which are one model; products of factors are not.

    Args:
        one: a tree with both factors of every adapter.
        other: another tree of the same network.
        scale: s.

    Raises:
        ModelError: adapters are of another kind, or have magnitudes.
    """
    refuse_other_kinds(one, "update_product")
    total = []
    for name in one:
        if name.endswith(_A):
            b = name.removesuffix(_A) + _B
            total.append(scale**2 * ((one[b].mT @ other[b]) * (one[name] @ other[name].mT)).sum())
        elif not name.endswith(_B):
            total.append((one[name] * other[name]).sum())
    return torch.stack(total).sum()


def merged(model: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Models side by side, with shares that all samples have, as one model with adapters of rank m r.

    Args:
        model: what :func:`side_by_side` has made, with the factors that are not trained; any other is returned as it
            is.
        like: one model of the network, for the shapes of its tensors.
    """
    tree = dict(model)
    if SHARES not in tree:
        return tree
    (shares,) = tree.pop(SHARES)
    return {name: _of_all(name, leaf, like[name], shares.to(leaf)) for name, leaf in tree.items()}


def _of_all(name: str, leaf: Tensor, like: Tensor, shares: Tensor) -> Tensor:
    """A tensor of the merged model; where all models have the same one, it is ``leaf``."""
    axis, count = (1 if name.endswith(_B) else 0), len(shares)
    alike = leaf.shape == like.shape
    if _is_factor(name):
        parts = [leaf] * count if alike else leaf.chunk(count, axis)
        return torch.cat([part * share if axis else part for part, share in zip(parts, shares, strict=True)], axis)
    if alike:
        return leaf
    return (torch.stack(leaf.chunk(count)) * shares.view(-1, *[1] * leaf.dim())).sum(0)


def _joined(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors with those of all models one after the other: along the rank, or along a head's outputs."""
    return {name: torch.cat([model[name] for model in models], 1 if name.endswith(_B) else 0) for name in models[0]}


def _is_factor(name: str) -> bool:
    return name.endswith((_A, _B))
