"""The convolutional nets of McMahan et al., LEAF, Reddi et al. and the TensorFlow tutorial."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Architecture, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape


class TwoCNN(Factorizable):
    """The convolutional net of McMahan et al. (2017, section 3): 1,663,370 parameters for (1, 28, 28), 10 classes.

    With ``padding: 0`` it is PFLlib's "4-layer CNN" (``FedAvgCNN``): 582,026 parameters for (1, 28, 28) and 10 classes,
    878,538 for (3, 32, 32) and 10, 924,708 for (3, 32, 32) and 100, 5,694,600 for (3, 64, 64) and 200.
    """

    name: Literal["two_cnn"] = Field(default="two_cnn", description=NAME)
    init: Initialization = Field(default="torch", description=INITIALIZATION)
    padding: int = Field(
        default=2,
        ge=0,
        le=2,
        description="Pixels added at each side before a convolution: 2 keeps the size of a map, 0 makes it 4 smaller.",
    )

    def build(self, spec: InputSpec) -> ClassificationModel:
        return initialized(_convolutional(self, spec, width=512, padding=self.padding), self.init)


class LeafCNN(Factorizable):
    """The FEMNIST net of LEAF (Caldas et al., 2018): 6,603,710 parameters for (1, 28, 28) and 62 classes."""

    name: Literal["leaf_cnn"] = Field(default="leaf_cnn", description=NAME)

    def build(self, spec: InputSpec) -> ClassificationModel:
        return _convolutional(self, spec, width=2048)


class ConvolutionalNet(ClassificationModel):
    """Two blocks of 5x5 convolution, ReLU and 2x2 max-pooling, then two linear layers.

    The features are the flattened output of the second block; with a padding of 2 they are of width
    ``64 * (height // 4) * (width // 4)``.
    """

    classifier_modules = ("fc", "head")
    feature_channels = 64
    channels_last = True

    def __init__(self, image: tuple[int, int, int], width: int, outputs: int, padding: int = 2) -> None:
        super().__init__()
        channels, rows, columns = image
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=padding)
        self.fc = nn.Linear(64 * pooled_side(rows, padding) * pooled_side(columns, padding), width)
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return x.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(functional.relu(self.fc(features)))
        return logits


def pooled_side(side: int, padding: int) -> int:
    """The side of the map behind both blocks; 0 or less where nothing is left."""
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return side


def _convolutional(config: Architecture, spec: InputSpec, width: int, padding: int = 2) -> ConvolutionalNet:
    channels, rows, columns = config.image(spec)
    if pooled_side(min(rows, columns), padding) < 1:
        least = next(side for side in range(4, 17) if pooled_side(side, padding) > 0)
        raise config.misfit(spec, f"images of at least {least} x {least} pixels")
    return ConvolutionalNet((channels, rows, columns), width, spec.num_classes, padding)


class TFCNN(Factorizable):
    """The net of TensorFlow's tutorial on CIFAR, as FedPHP (Li et al., 2021) calls it, in three forms.

    Three 3x3 convolutions of 32, 64 and 64 channels with ReLU. For (3, 32, 32) and 10 classes:

    * ``fedphp``, of FedPHP's code: padding 1, 2x2 pooling after each, and one linear layer without bias: 66,560
      parameters.
    * ``fedphp_hidden``: a hidden layer of 128 units before the last one, both with bias: 188,810.
    * ``tutorial``: no padding, no pooling after the third convolution, a hidden layer of 64 units: 122,570.

    The features are the flattened output of the convolutions.
    """

    name: Literal["tf_cnn"] = Field(default="tf_cnn", description=NAME)
    form: Literal["fedphp", "fedphp_hidden", "tutorial"] = Field(default="fedphp", description="Which of the forms.")

    def build(self, spec: InputSpec) -> ClassificationModel:
        padding = 0 if self.form == "tutorial" else 1
        layers: list[nn.Module] = []
        channels = self.image(spec)[0]
        for width in (32, 64, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        if self.form == "tutorial":
            layers.pop()
        body = nn.Sequential(*layers)
        features = math.prod(map_shape(self, spec, body))
        hidden = {"fedphp": [], "fedphp_hidden": [128], "tutorial": [64]}[self.form]
        head = nn.Linear([features, *hidden][-1], spec.num_classes, bias=self.form != "fedphp")
        net = StackedNet(body, linear_stack([features, *hidden]), head, channels)
        net.channels_last = True  # two thirds of the time of a step
        return net


class ReddiCNN(Factorizable):
    """The FEMNIST net of Reddi et al. (2021): 1,206,590 parameters for (1, 28, 28) and 62 classes.

    3x3 convolutions without padding, ReLU, one 2x2 pooling after the last of them, dropout 0.25, a hidden layer of
    128 units, dropout 0.5. FedMe (Matsuda et al., 2021) takes one to four convolutions without saying how wide they
    are; here the first has 32 channels and the others 64: 700,670, 1,206,590, 1,055,102 and 919,998 parameters. The
    features are the flattened map before dropout.
    """

    name: Literal["reddi_cnn"] = Field(default="reddi_cnn", description=NAME)
    layers: int = Field(default=2, ge=1, le=4, description="Number of convolutions.")
    dropout: bool = Field(default=True, description="Whether there is dropout.")

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        channels = self.image(spec)[0]
        for width in (32, 64, 64, 64)[: self.layers]:
            layers += [nn.Conv2d(channels, width, 3), nn.ReLU()]
            channels = width
        body = nn.Sequential(*layers, nn.MaxPool2d(2))
        features = math.prod(map_shape(self, spec, body))
        hidden = [nn.Linear(features, 128), nn.ReLU()]
        if self.dropout:
            hidden = [nn.Dropout(0.25), *hidden, nn.Dropout(0.5)]
        return StackedNet(body, nn.Sequential(*hidden), nn.Linear(128, spec.num_classes), channels)
