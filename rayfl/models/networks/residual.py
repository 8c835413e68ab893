"""The small residual net of SuPerFed's code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.layers.normalization import NORMALIZATION, Normalization, normalize_by
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape


class ResNet9(Factorizable):
    """The ResNet9 of SuPerFed's code (KDD 2022): 5,054,784 parameters for (3, 28, 28) and 100 classes.

    A 3x3 convolution of 64 channels (stride 2), 3x3 pooling (stride 2), one block each of 64, 128, 256 and 512
    channels (the last two of stride 2), global average pooling, then layers of 256 units and of the classes; no
    biases in convolutions and linear layers. A block whose input has the shape of its output, the first, has no
    shortcut at all: that is how the code does it. The code normalizes by batches without running statistics.
    """

    name: Literal["resnet9"] = Field(default="resnet9", description=NAME)
    norm: Normalization = Field(default="batch_no_stats", description=NORMALIZATION)
    init: Initialization = Field(default="xavier_normal", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        body = nn.Sequential(
            nn.Conv2d(self.image(spec)[0], 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBlock(64, 64, 1),
            ResidualBlock(64, 128, 1),
            ResidualBlock(128, 256, 2),
            ResidualBlock(256, 512, 2),
            nn.AdaptiveAvgPool2d(1),
        )
        normalize_by(body, self.norm)
        map_shape(self, spec, body)
        hidden = linear_stack([512, 256], bias=False)
        return initialized(StackedNet(body, hidden, nn.Linear(256, spec.num_classes, bias=False), 512), self.init)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization, and a 1x1 convolution around them where the shape changes.

    Args:
        inputs: channels in.
        outputs: channels out.
        stride: stride of the first convolution and of the one around.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.main(x)
        return functional.relu(maps if self.shortcut is None else maps + self.shortcut(x))
