"""Drawn features: a layer behind a network gives every sample a Gaussian of representations, which the head reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.heads import head_logits
from algorithms.parts.layers import linear
from rayfl.engine.gradients.counted_normals import keyed_normals
from rayfl.tasks.base import Model, Predictor


def distribution(encoder: Mapping[str, Tensor], features: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma of the representations of samples, shape (b, d) each, by their features, shape (b, d)."""
    mu, rho = linear(encoder, features).chunk(2, dim=-1)
    return mu, F.softplus(rho)


def divergence(mean: Tensor, spread: Tensor, other_mean: Tensor, other_spread: Tensor) -> Tensor:
    """KL( N(mean, spread^2) || N(other_mean, other_spread^2) ) of each row in nats, shape (b,), from shapes (b, d)."""
    ratio = spread / other_spread
    apart = (mean - other_mean) / other_spread
    return ((ratio.square() + apart.square() - 1) / 2 - ratio.log()).sum(-1)


def drawn_predictor(model: Model, encoder: Model, count: int) -> Predictor:
    """The mean probability of some representations of every sample; with 0 of them that at mu.

    Args:
        model: the network's tensors, whose last layer reads representations.
        encoder: of :func:`distribution`.
        count: representations of a sample.
    """

    def predictions(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        own, layer = models
        features, _ = task.network.head_inputs_and_logits(own, x, training=False)
        mu, sigma = distribution(layer, features)
        # All samples have the same noise, so that no score depends on which of them are scored together.
        keys = torch.arange(count, device=mu.device)
        places = [mu + sigma * one for one in keyed_normals(keys, mu.shape[1], torch.float32).to(mu)] or [mu]
        members = [task.predicted(head_logits(task.network, own, place)) for place in places]
        found: Tensor = members[0] if len(members) == 1 else task.mixed(members)
        return found

    return Predictor.of(model, encoder, combine=predictions)
