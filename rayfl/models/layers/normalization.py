"""Normalization layers by name."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from rayfl.models.forward_pass import Stackable

Normalization: TypeAlias = Literal["batch", "batch_no_stats", "group", "frozen", "none"]
NORMALIZATION = (
    "What stands where the architecture has batch normalization. batch: batch normalization, whose running statistics "
    "are part of the model that travels; batch_no_stats: without running statistics, so that also a prediction "
    "depends on the batch it is made in; group: group normalization of up to 32 groups; frozen: the initial (for "
    "pretrained weights, the stored) statistics are used throughout and never change, scale and shift are trained; "
    "none: nothing."
)


class _StackableNorm(_BatchNorm, Stackable):
    """Batch normalization that also takes a batch with a single value a channel, where PyTorch's raises ValueError.

    The last batch of a client may be one sample, and its last map one pixel. The variance of one value is 0: it is
    normalized to 0, or, where there are running statistics, by these, which it leaves as they are. Padding of the
    mini-batches of stacked clients is no part of the statistics. Batches are not counted: nothing reads the number.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps of shape (b, channels, ...)."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        mean, variance, momentum = self.running_mean, self.running_var, self.momentum or 0.0
        own = self.training or mean is None
        mask = self.forward_pass.mask_of(x) if own and self.training else None
        if mask is not None:
            return self._without_padding(x, mask)
        if own and x.numel() == self.num_features:
            own = mean is None
            if own:
                zeros = torch.zeros_like(x)
                return zeros if self.bias is None else zeros + self.bias.view(-1, *(1 for _ in x.shape[2:]))
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, own, momentum, self.eps)

    def _without_padding(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalizes by the statistics of the rows that are no padding."""
        beyond = [1] * (x.dim() - 2)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide, count = x.to(mask.dtype), mask.sum() * x.shape[2:].numel()
        share = (mask / count).view(-1, 1, *beyond)
        mean = (wide * share).sum(dims)
        variance = ((wide - mean.view(-1, *beyond)).square() * share).sum(dims)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                pull = (count > 1).to(mask.dtype) * (self.momentum or 0.0)
                unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
                now = [(self.running_mean, mean.detach()), (self.running_var, unbiased)]
                before = [running.clone() for running, _ in now]
                for running, found in now:
                    running.add_((found - running) * pull)
            mean, variance = (torch.where(count > 1, *pair) for pair in zip((mean, variance), before, strict=True))
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        found = (wide - mean.view(-1, *beyond)) * scale.view(-1, *beyond)
        found = found if self.bias is None else found + self.bias.view(-1, *beyond)
        return found.to(x.dtype)


class BatchNormalization1d(_StackableNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that can be stacked."""


class BatchNormalization(_StackableNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that can be stacked."""


class BatchNormalization3d(_StackableNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` that can be stacked."""


BATCH_NORMALIZATIONS: dict[type[nn.Module], type[Stackable]] = {
    nn.BatchNorm1d: BatchNormalization1d,
    nn.BatchNorm2d: BatchNormalization,
    nn.BatchNorm3d: BatchNormalization3d,
}
"""By kind of PyTorch's, that which can be stacked."""


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
