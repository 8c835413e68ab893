"""The small MobileNet of SuPerFed's code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.layers.normalization import NORMALIZATION, Normalization, normalize_by
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape


class MobileNet(Factorizable):
    """The MobileNet of SuPerFed's code (KDD 2022): 364,480 parameters for (3, 64, 64) and 200 classes.

    A 3x3 convolution of 32 channels (stride 2), four blocks of 64, 128, 256 and 512 channels, each a depthwise 3x3
    convolution without padding (strides 1, 2, 2, 1) and a 1x1 convolution, global average pooling, then layers of
    256 units and of the classes; no biases in convolutions and linear layers. Images have at least 33 x 33 pixels.
    The code normalizes by batches without running statistics.
    """

    name: Literal["mobilenet"] = Field(default="mobilenet", description=NAME)
    norm: Normalization = Field(default="batch_no_stats", description=NORMALIZATION)
    init: Initialization = Field(default="xavier_normal", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers = _normalized(nn.Conv2d(self.image(spec)[0], 32, 3, stride=2, padding=1, bias=False))
        for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 1)):
            layers += _normalized(nn.Conv2d(inputs, inputs, 3, stride=stride, groups=inputs, bias=False))
            layers += _normalized(nn.Conv2d(inputs, outputs, 1, bias=False))
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        normalize_by(body, self.norm)
        map_shape(self, spec, body)
        hidden = linear_stack([512, 256], bias=False)
        return initialized(StackedNet(body, hidden, nn.Linear(256, spec.num_classes, bias=False), 512), self.init)


def _normalized(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()]
