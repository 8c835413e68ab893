"""Models as users write them."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel


def plain(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, spec.num_classes))


class Own(ClassificationModel):
    """Says itself what its parts are; divides by a constant that is no part of the tree."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.inner = nn.Linear(12, 5)
        self.head = nn.Linear(5, spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x.flatten(1) / self.scale))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Frozen(ClassificationModel):
    """A random projection that stays as it was drawn, before two layers that are trained."""

    def __init__(self, spec: InputSpec, frozen: tuple[str, ...] = ("project",)) -> None:
        super().__init__()
        self.project = nn.Linear(math.prod(spec.shape), 16)
        self.inner = nn.Linear(16, 8)
        self.head = nn.Linear(8, spec.num_classes)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(torch.tanh(self.project(x.flatten(1)))))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def probed(spec: InputSpec) -> nn.Module:
    """Only the last layer is trained."""
    return Frozen(spec, ("project", "inner"))


def fixed_head(spec: InputSpec) -> nn.Module:
    """Only what is before the last layer is trained."""
    return Frozen(spec, ("head",))


def untrainable(spec: InputSpec) -> nn.Module:
    return Frozen(spec, ("project", "inner", "head"))


class Dropping(Own):
    """Draws random numbers without a layer that would tell."""

    def features(self, x: Tensor) -> Tensor:
        return functional.dropout(super().features(x), 0.5, self.training)


class Mixing(Own):
    """Its outputs depend on the whole batch."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features - features.mean(0)


class Branching(Own):
    """Decides by the value of a tensor, which vmap cannot follow."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features if bool(self.inner.weight.sum() > 1e6) else features + 1


class Deviating(Own):
    """Its forward pass is not what its parts say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def scaled(spec: InputSpec) -> nn.Module:
    """Has a layer after the head."""
    return nn.Sequential(plain(spec), nn.Hardtanh(-1e-3, 1e-3))


def unseeded(spec: InputSpec) -> nn.Module:
    model = Own(spec)
    nn.init.constant_(model.head.bias, random.random())
    return model


def few_classes(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, spec.num_classes - 1))


def overwriting(spec: InputSpec) -> nn.Module:
    """Dropout overwrites what the backward pass of the activation reads."""
    layers = nn.Linear(12, 5), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(5, spec.num_classes)
    return nn.Sequential(nn.Flatten(), *layers)


def lazy(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.Linear(5, spec.num_classes))


class Counting(Own):
    """Counts passes in a buffer of integers, which is in no client's model."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__(spec)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        self.count += int(self.training)
        return super().features(x) / (1 + self.count)


class Listing(Own):
    """Computes with a weight that it keeps in a list."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__(spec)
        self.weights = [self.inner.weight]

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(functional.linear(x.flatten(1), self.weights[0]))


class Replacing(Own):
    """Keeps a running mean, each time in another tensor."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__(spec)
        self.register_buffer("mean", torch.zeros(5))

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return features - self.mean


def tied(spec: InputSpec) -> nn.Module:
    """The last layer has the weight of the first."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False))
    model[2].weight = model[1].weight
    return model


def normalized(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(12, spec.num_classes)))


def pixelwise(spec: InputSpec) -> nn.Module:
    return nn.Linear(2, spec.num_classes)


def rows(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(2, spec.num_classes))


def failing(spec: InputSpec) -> nn.Module:
    raise KeyError("weights")


def nothing(spec: InputSpec) -> None:
    return None


def fully_convolutional(spec: InputSpec) -> nn.Module:
    """Logits of shape (b, C, H, W[, D])."""
    kind = nn.Conv2d if len(spec.shape) == 3 else nn.Conv3d
    return nn.Sequential(kind(spec.shape[0], 5, 3, padding=1), nn.ReLU(), kind(5, spec.num_classes, 1))


def shrinking(spec: InputSpec) -> nn.Module:
    return nn.Sequential(nn.Conv2d(spec.shape[0], 5, 3), nn.Conv2d(5, spec.num_classes, 1))


def complex_layer(spec: InputSpec) -> nn.Module:
    """A model one of whose parameters is complex."""
    model = plain(spec)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model
