"""Penalties that go by the name of a proximal term."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.objectives import Declared, Pull
from rayfl.params import leaves, map_leaves, squared_distance


def _norm_per_layer(model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    """The gradient of each weight has length 1 whatever the distance, and 0 at the anchor."""
    distances = [
        torch.linalg.vector_norm(leaf - other)
        for (path, leaf), (_, other) in zip(leaves(model), leaves(anchor), strict=True)
        if "weight" in path  # recurrent layers name theirs weight_ih_l0 and the like
    ]
    return torch.stack(distances).sum()


def _smooth_l1_mean(model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    return torch.stack([leaf for _, leaf in leaves(map_leaves(F.smooth_l1_loss, model, anchor))]).mean()


_FORMS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]] = {
    "half_squared": lambda model, anchor: squared_distance(model, anchor) / 2,
    "squared": squared_distance,
    "norm_per_layer": _norm_per_layer,
    "smooth_l1_mean": _smooth_l1_mean,
}


def penalty(form: str, model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    """The distance of ``model`` from ``anchor``; a scalar.

    Args:
        form: ``half_squared`` (1/2 ||.||^2: FedProx), ``squared`` (||.||^2: the SuPerFed papers),
            ``norm_per_layer`` (sum over weight tensors of the unsquared norm: the official SuPerFed code),
            ``smooth_l1_mean`` (mean over tensors of the mean smooth L1: the official FedPHP code).
    """
    return _FORMS[form](model, anchor)


def declared_form(form: str, weight: float, anchor: str = "received") -> Declared | None:
    """The task's loss and ``weight`` times the penalty, as far as the engine can do without calling an objective.

    Args:
        form: see :func:`penalty`.
        weight: of the penalty.
        anchor: the entry of the objective's ``frozen`` that it is towards.
    """
    if not weight:
        return Declared()
    factor = {"half_squared": weight, "squared": 2 * weight}.get(form)
    return None if factor is None else Declared(Pull(anchor, factor))
