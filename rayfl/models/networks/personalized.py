"""Convolutional nets of the papers on SuPerFed and FLOCO."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.networks.stacked import StackedNet, linear_stack, map_shape

_POOL_AND_LAST_KERNEL = {28: (2, 2), 32: (2, 3), 64: (3, 2)}
"""Pooling and third kernel by the side of the image: those that leave a map of exactly one pixel."""


class SuPerFedCNN(Factorizable):
    """The five-layer CNN of SuPerFed's first version (Hahn et al., arXiv 2109.07628, table 4).

    Convolutions of 32 (5x5), 64 (5x5) and 32 channels, each followed by ReLU and pooling, down to one pixel; then
    layers of 512 units and of the classes. Pooling and the third kernel follow the images: 2x2 and 2x2 for 28x28
    (EMNIST, 62 classes: 109,022 parameters), 2x2 and 3x3 for 32x32 (CIFAR-10: 94,186, CIFAR-100: 140,356), 3x3 and
    2x2 for 64x64 (Tiny ImageNet: 181,416). The paper's 1x1 convolutions on one pixel are linear layers here. The
    features are the 32 channels of that pixel.
    """

    name: Literal["superfed_cnn"] = Field(default="superfed_cnn", description=NAME)
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        channels, rows, columns = self.image(spec)
        if rows != columns or rows not in _POOL_AND_LAST_KERNEL:
            raise self.misfit(spec, "images of 28 x 28, 32 x 32 or 64 x 64 pixels")
        pool, kernel = _POOL_AND_LAST_KERNEL[rows]
        layers: list[nn.Module] = []
        for inputs, outputs, size in ((channels, 32, 5), (32, 64, 5), (64, 32, kernel)):
            layers += [nn.Conv2d(inputs, outputs, size), nn.ReLU(), nn.MaxPool2d(pool)]
        head = nn.Linear(512, spec.num_classes)
        return initialized(StackedNet(nn.Sequential(*layers), linear_stack([32, 512]), head, 32), self.init)


class SuPerFedTwoCNN(Factorizable):
    """The TwoCNN of SuPerFed's code (KDD 2022): 722,800 parameters for (3, 28, 28) and 10 classes.

    Two 5x5 convolutions of 32 and 64 channels with padding 1, each followed by ReLU and 2x2 pooling with padding 1,
    then layers of 200, 200 and the classes, which form the classifier block; no biases. With one channel: 721,200.
    """

    name: Literal["superfed_two_cnn"] = Field(default="superfed_two_cnn", description=NAME)
    init: Initialization = Field(default="xavier_normal", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        layers: list[nn.Module] = []
        for inputs, outputs in ((self.image(spec)[0], 32), (32, 64)):
            convolution = nn.Conv2d(inputs, outputs, 5, padding=1, bias=False)
            layers += [convolution, nn.ReLU(), nn.MaxPool2d(2, padding=1)]
        body = nn.Sequential(*layers)
        hidden = linear_stack([math.prod(map_shape(self, spec, body)), 200, 200], bias=False)
        head = nn.Linear(200, spec.num_classes, bias=False)
        return initialized(StackedNet(body, hidden, head, 64), self.init)


class SimpleCNN(Factorizable):
    """The SimpleCNN of FLOCO (Grinwald et al., 2024), which is FedPAC's (Xu et al., 2023), with leaky ReLU (0.01).

    * ``cifar``: convolutions of 16 (5x5), 32 (5x5, padding 1) and 64 channels (3x3, padding 1), each followed by 2x2
      pooling, and a hidden layer of 128 units: 107,690 parameters for (3, 32, 32) and 10 classes.
    * ``femnist``: convolutions of 16 and 32 channels (5x5), each followed by 2x2 pooling, and no hidden layer:
      45,054 parameters for (1, 28, 28) and 62 classes.

    The features are the flattened output of the convolutions.
    """

    name: Literal["simple_cnn"] = Field(default="simple_cnn", description=NAME)
    form: Literal["auto", "cifar", "femnist"] = Field(
        default="auto", description="Which of the forms; auto: cifar for images of three channels, femnist for one."
    )

    def build(self, spec: InputSpec) -> ClassificationModel:
        channels = self.image(spec)[0]
        form = {1: "femnist", 3: "cifar"}.get(channels) if self.form == "auto" else self.form
        if form is None:
            raise self.misfit(spec, "images of one or three channels, or its form to be set,")
        blocks = [(channels, 16, 5, 0), (16, 32, 5, 1), (32, 64, 3, 1)]
        if form == "femnist":
            blocks = [(channels, 16, 5, 0), (16, 32, 5, 0)]
        layers: list[nn.Module] = []
        for inputs, outputs, size, padding in blocks:
            layers += [nn.Conv2d(inputs, outputs, size, padding=padding), nn.LeakyReLU(), nn.MaxPool2d(2)]
        body = nn.Sequential(*layers)
        shape = map_shape(self, spec, body)
        widths = [math.prod(shape)] if form == "femnist" else [math.prod(shape), 128]
        head = nn.Linear(widths[-1], spec.num_classes)
        return StackedNet(body, linear_stack(widths, nn.LeakyReLU), head, shape[0])
