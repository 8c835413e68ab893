"""Nets on waveforms of sound."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.layers.normalization import NORMALIZATION, Normalization, normalize_by
from rayfl.models.networks.stacked import StackedNet, map_shape


class M5(Factorizable):
    """The M5 of Dai et al. (2017, arXiv 1610.00087, table 1) on raw waveforms: 559,114 parameters for 10 classes.

    Four blocks along time, each a convolution, batch normalization, ReLU and max-pooling by 4 (of what is left over,
    too): 80 long with stride 4, and three of length 3 that keep the time, with ``width``, ``width``, twice and four
    times as many channels. Then the mean over time, which is the features, and the output layer. With channels C and
    times T an input is an image of shape (C, 1, T), such as (1, 1, 16000) for a second of sound.
    """

    name: Literal["m5"] = Field(default="m5", description=NAME)
    width: int = Field(default=128, ge=1, description="Channels of the first two blocks; the paper has 128.")
    norm: Normalization = Field(default="batch", description=NORMALIZATION)
    init: Initialization = Field(default="xavier_normal", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        channels, rows, _ = self.image(spec)
        if rows != 1:
            raise self.misfit(spec, "waveforms, which have the shape (channels, 1, times)")
        for width in (self.width, self.width, 2 * self.width, 4 * self.width):
            kernel, stride, padding = (3, 1, 1) if layers else (80, 4, 38)
            layers += [
                nn.Conv2d(channels, width, (1, kernel), (1, stride), (0, padding)),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.MaxPool2d((1, 4), ceil_mode=True),
            ]
            channels = width
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        normalize_by(body, self.norm)
        map_shape(self, spec, body)
        head = nn.Linear(channels, spec.num_classes)
        return initialized(StackedNet(body, nn.Sequential(), head, channels), self.init)
