"""Nets of stacked 3x3 convolutions, after Simonyan & Zisserman (2015), without normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape

_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""By depth, how many convolutions of 64, 128, 256, 512 and 512 channels there are before each pooling."""


class VGG(Factorizable):
    """VGG11, 13, 16 or 19 without batch normalization, for images of at least 32 x 32 pixels.

    * ``fedma``, of FedMA (Wang et al., 2020) and FedMe (Matsuda et al., 2021): two hidden layers of 512 units with
      dropout before each; weights of convolutions drawn from N(0, 2 / (9 * channels out)), their biases 0. For
      (3, 32, 32) and 10 classes 9,750,922, 9,935,434, 15,245,130 and 20,554,826 parameters.
    * ``fedphp``, of FedPHP's code (Li et al., 2021): one linear layer without bias. VGG11 for (3, 32, 32) has
      9,225,600 parameters with 10 classes and 9,271,680 with 100.

    The features are the flattened output of the convolutions, before dropout.
    """

    name: Literal["vgg"] = Field(default="vgg", description=NAME)
    depth: Literal[11, 13, 16, 19] = Field(default=13, description="Number of layers in the original net.")
    form: Literal["fedma", "fedphp"] = Field(default="fedma", description="Which of the forms.")
    dropout: float | None = Field(
        default=None, ge=0, lt=1, description="Rate of the dropout in the form fedma; null: 0.5."
    )

    @model_validator(mode="after")
    def _dropout_has_a_place(self) -> Self:
        if self.dropout is not None and self.form == "fedphp":
            raise ValueError("dropout: the form fedphp has none; leave it out or set form to fedma")
        return self

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        channels = self.image(spec)[0]
        for width, count in zip((64, 128, 256, 512, 512), _CONVOLUTIONS[self.depth], strict=True):
            layers += _block(channels, [width] * count)
            channels = width
        body = nn.Sequential(*layers)
        features = math.prod(map_shape(self, spec, body))
        if self.form == "fedphp":
            return StackedNet(body, nn.Sequential(), nn.Linear(features, spec.num_classes, bias=False), channels)
        for layer in body:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0, math.sqrt(2 / (9 * layer.out_channels)))
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        rate = 0.5 if self.dropout is None else self.dropout
        hidden = nn.Sequential(
            nn.Dropout(rate),
            nn.Linear(features, 512),
            nn.ReLU(),
            nn.Dropout(rate),
            nn.Linear(512, 512),
            nn.ReLU(),
        )
        return StackedNet(body, hidden, nn.Linear(512, spec.num_classes), channels)


class VGG9(Factorizable):
    """The VGG9 of SuPerFed's code (KDD 2022): 1,718,416 parameters for (1, 28, 28) and 62 classes.

    3x3 convolutions of 16, 32, 64, 128, 256 and 512 channels, 2x2 pooling after the first, the second, the fourth
    and the last, then layers of 256 units and of the classes; no biases.
    """

    name: Literal["vgg9"] = Field(default="vgg9", description=NAME)
    init: Initialization = Field(default="xavier_normal", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        channels = self.image(spec)[0]
        for widths in ([16], [32], [64, 128], [256, 512]):
            layers += _block(channels, widths, bias=False)
            channels = widths[-1]
        body = nn.Sequential(*layers)
        hidden = linear_stack([math.prod(map_shape(self, spec, body)), 256], bias=False)
        return initialized(StackedNet(body, hidden, nn.Linear(256, spec.num_classes, bias=False), channels), self.init)


def _block(channels: int, widths: Sequence[int], bias: bool = True) -> list[nn.Module]:
    """3x3 convolutions of the given widths with ReLU, and 2x2 pooling."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=bias), nn.ReLU()]
        channels = width
    return [*layers, nn.MaxPool2d(2)]
