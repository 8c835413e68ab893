"""Normalization layers by name."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

Normalization: TypeAlias = Literal["batch", "batch_no_stats", "group", "frozen", "none"]
NORMALIZATION = (
    "What stands where the architecture has batch normalization. batch: batch normalization, whose running statistics "
    "are part of the model that travels; batch_no_stats: without running statistics, so that also a prediction "
    "depends on the batch it is made in; group: group normalization of up to 32 groups; frozen: the initial (for "
    "pretrained weights, the stored) statistics are used throughout and never change, scale and shift are trained; "
    "none: nothing."
)


class BatchNormalization(nn.BatchNorm2d):
    """Batch normalization that also takes a batch with a single value a channel, where PyTorch's raises ValueError.

    The last batch of a client may be one sample, and its last map one pixel. The variance of one value is 0: it is
    normalized to 0, or, where there are running statistics, by these, which it leaves as they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > self.num_features or not (self.training or self.running_mean is None):
            return super().forward(x)
        if self.running_mean is None or self.running_var is None:
            return torch.zeros_like(x) + self.bias[:, None, None]
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class FrozenStatisticsNorm(nn.Module):
    """Batch normalization that always uses the statistics it was given; only scale and shift are trained.

    Args:
        channels: channels of the maps (b, channels, rows, columns).
        eps: what is added to the variance.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        # written out, because PyTorch's own function cannot be differentiated by its statistics, as vmap(grad) does
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


NORMALIZATION_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, FrozenStatisticsNorm)
"""Classes of layers that bring activations to a common scale."""


def normalize_by(module: nn.Module, norm: Normalization) -> int:
    """Puts the named normalization in the place of every batch normalization of maps inside a module.

    Scales, shifts and, where they are used, statistics are kept.

    Returns:
        How many batch normalizations there were.
    """
    found = 0
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                found += 1
                setattr(owner, name, _replacement(child, norm))
    return found


def _replacement(old: nn.BatchNorm2d, norm: Normalization) -> nn.Module:
    # timm's layers also do what comes after normalization
    further = [getattr(old, name, None) for name in ("drop", "act")]
    after = [layer for layer in further if isinstance(layer, nn.Module) and not isinstance(layer, nn.Identity)]
    new = _normalization(old, norm)
    return nn.Sequential(new, *after) if after else new


def _normalization(old: nn.BatchNorm2d, norm: Normalization) -> nn.Module:
    channels = old.num_features
    if norm == "none":
        return nn.Identity()
    new: nn.Module
    if norm == "group":
        new = nn.GroupNorm(math.gcd(32, channels), channels, old.eps)
    elif norm == "frozen":
        new = FrozenStatisticsNorm(channels, old.eps)
    else:
        new = BatchNormalization(channels, old.eps, old.momentum, track_running_stats=norm == "batch")
    new.load_state_dict(old.state_dict(), strict=False)
    return new
