"""Nets on windows of sensors' signals."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape

_WIDTHS = (32, 64)


class HarCNN(Factorizable):
    """The HAR-CNN of PFLlib, on signals along time: 2,253,958 parameters for (9, 1, 128) and 6 classes.

    Two blocks of a 1 x 9 convolution (32 and 64 channels, no padding), ReLU and max-pooling that halves the time, then
    hidden linear layers. The features are the flattened output of the second block.
    """

    name: Literal["har_cnn"] = Field(default="har_cnn", description=NAME)
    kernel: int = Field(default=9, ge=1, description="Length of the convolutions, in times.")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1024, 512), description="Units of each hidden layer; none: the head reads the features."
    )

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        channels = self.image(spec)[0]
        for width in _WIDTHS:
            layers += [nn.Conv2d(channels, width, (1, self.kernel)), nn.ReLU(), nn.MaxPool2d((1, 2), stride=2)]
            channels = width
        body = nn.Sequential(*layers)
        widths = [math.prod(map_shape(self, spec, body)), *self.hidden]
        return StackedNet(body, linear_stack(widths), nn.Linear(widths[-1], spec.num_classes), channels)
