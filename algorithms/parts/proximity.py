"""Penalties that go by the name of a proximal term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.objectives.pairs import DISTANCE, Pair
from rayfl.objectives.points import Name
from rayfl.objectives.terms import Sum, penalty
from rayfl.params import leaves, map_leaves


def _norm_per_layer(model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    """The gradient of each weight has length 1 whatever the distance, and 0 at the anchor."""
    distances = [
        torch.linalg.vector_norm(leaf - other)
        for (path, leaf), (_, other) in zip(leaves(model), leaves(anchor), strict=True)
        if "weight" in path  # recurrent layers name theirs weight_ih_l0 and the like
    ]
    return torch.stack(distances).sum()


def _norm(model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    """The gradient has length 1 whatever the distance, and is 0 at the anchor."""
    distances = [
        torch.linalg.vector_norm(leaf - other)
        for (_, leaf), (_, other) in zip(leaves(model), leaves(anchor), strict=True)
    ]
    found: Tensor = torch.linalg.vector_norm(torch.stack(distances))
    return found


def _smooth_l1_mean(model: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensor:
    return torch.stack([leaf for _, leaf in leaves(map_leaves(F.smooth_l1_loss, model, anchor))]).mean()


_FORMS = {
    "half_squared": (0.5, DISTANCE),
    "squared": (1, DISTANCE),
    "norm": (1, Pair("norm", _norm)),
    "norm_per_layer": (1, Pair("norm_per_layer", _norm_per_layer)),
    "smooth_l1_mean": (1, Pair("smooth_l1_mean", _smooth_l1_mean)),
}


def proximity(form: str, of: Name, to: Name) -> Sum:
    """The distance of a model from an anchor, as a term.

    Args:
        form: ``half_squared`` (1/2 ||.||^2: FedProx), ``squared`` (||.||^2: the SuPerFed papers),
            ``norm`` (||.||: the official FedCorr code),
            ``norm_per_layer`` (sum over weight tensors of the unsquared norm: the official SuPerFed code),
            ``smooth_l1_mean`` (mean over tensors of the mean smooth L1: the official FedPHP code).
        of: the name of the model, or of what is trained of it.
        to: the name of the anchor.
    """
    factor, pair = _FORMS[form]
    return factor * penalty(pair, of, to)
