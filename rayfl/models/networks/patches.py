"""A transformer that reads windows of series in patches."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.networks.forecasters import INDIVIDUAL, EachAlone, check_windows

_FLAT = 1e-5
"""Added to the variance of a window, which may be 0."""


class PatchTransformer(Factorizable):
    """PatchTST (Nie et al., ICLR 2023): attention over patches of a window, whose vectors a linear head reads at once.

    Each series is forecast from its own past. Its window is normalized by its own mean and deviation, which the
    forecast gets back. The last value is repeated ``stride`` times, and the window cut into patches. A linear layer and
    learned positions make a vector of each, and layers of multi-head attention and of a perceptron with GELU follow,
    each added to what it reads. In place of the paper's batch normalization there is layer normalization, which does
    not mix the samples of clients. The head reads all vectors of the last layer.
    """

    name: Literal["patch_transformer"] = Field(default="patch_transformer", description=NAME)
    patch: int = Field(default=16, ge=1, description="Times of a patch, at most dataset.window.")
    stride: int = Field(default=8, ge=1, description="Times from the beginning of a patch to that of the next one.")
    width: int = Field(default=16, ge=1, description="Numbers of a patch's vector, a multiple of heads.")
    heads: int = Field(default=4, ge=1, description="Attention heads of a layer.")
    layers: int = Field(default=2, ge=1, description="Layers of attention and perceptron.")
    hidden: int = Field(default=64, ge=1, description="Hidden units of a layer's perceptron.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of what layers add that a training step leaves out."
    )
    individual: bool = Field(default=False, description=INDIVIDUAL)

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} cannot be divided among heads={self.heads}: make it a multiple")
        return self

    def build(self, spec: InputSpec) -> ClassificationModel:
        check_windows(self, spec, alone=True)
        if self.patch > spec.shape[-1]:
            raise self.misfit(spec, f"windows of at least {self.patch} times, or a smaller model.patch")
        return PatchedForecaster(spec, self)


class PatchedForecaster(EachAlone):
    """See :class:`PatchTransformer`; features of a series are its patches' vectors, then mean and deviation.

    Args:
        spec: of windows.
        sizes: of the model.
    """

    def __init__(self, spec: InputSpec, sizes: PatchTransformer) -> None:
        patches = (spec.shape[-1] - sizes.patch) // sizes.stride + 2
        super().__init__(spec, patches * sizes.width, sizes.individual)
        self._patch, self._stride = sizes.patch, sizes.stride
        self.embed = nn.Linear(sizes.patch, sizes.width)
        self.positions = nn.Parameter(torch.empty(patches, sizes.width).uniform_(-0.02, 0.02))
        self.begin = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(AttentionLayer(sizes) for _ in range(sizes.layers))

    def of_series(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True, unbiased=False) + _FLAT).sqrt()
        normal = (x - mean) / deviation
        padded = torch.cat([normal, normal[..., -1:].expand(*normal.shape[:-1], self._stride)], -1)
        vectors = self.begin(self.embed(padded.unfold(-1, self._patch, self._stride)) + self.positions)
        for layer in self.layers:
            vectors = layer(vectors)
        return torch.cat([vectors.flatten(-2), mean, deviation], -1)

    def forecast(self, features: Tensor) -> Tensor:
        mean, deviation = features[..., -2:-1], features[..., -1:]
        return super().forecast(features[..., :-2]) * deviation + mean


class AttentionLayer(nn.Module):
    """Multi-head attention and a perceptron, each added to its input and normalized.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: PatchTransformer) -> None:
        super().__init__()
        self._heads = sizes.heads
        self.queries, self.keys, self.values, self.joined = (nn.Linear(sizes.width, sizes.width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)
        self.after_attention, self.after_perceptron = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.first, self.second = nn.Dropout(sizes.dropout), nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of shape (b, k, patches, width)."""
        queries, keys, values = (
            layer(x).unflatten(-1, (self._heads, -1)).transpose(-3, -2)
            for layer in (self.queries, self.keys, self.values)
        )
        weights = (queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5).softmax(-1)
        attended = self.joined((weights @ values).transpose(-3, -2).flatten(-2))
        x = self.after_attention(x + self.first(attended))
        found: Tensor = self.after_perceptron(x + self.second(self.narrow(functional.gelu(self.wide(x)))))
        return found
