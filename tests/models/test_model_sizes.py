"""Sizes of the zoo's models, as the papers give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.networks.residual import ResidualBlock
from rayfl.models.zoo import (
    M5,
    TFCNN,
    VGG,
    VGG9,
    Architecture,
    CharLSTM,
    HarCNN,
    MobileNet,
    ReddiCNN,
    ResNet9,
    ResNet18,
    SimpleCNN,
    SqueezeNet,
    SuPerFedCNN,
    SuPerFedTwoCNN,
    TwoNN,
)
from tests.support.zoo_inputs import image, text


@pytest.mark.parametrize(
    ("config", "spec", "count"),
    [
        (SuPerFedCNN(), image(1, 28, 62), 109_022),
        (SuPerFedCNN(), image(3, 32, 10), 94_186),
        (SuPerFedCNN(), image(3, 32, 100), 140_356),
        (SuPerFedCNN(), image(3, 64, 200), 181_416),
        (TwoNN(hidden=(200, 200, 200), bias=False), image(1, 28, 10), 238_800),
        (SuPerFedTwoCNN(), image(3, 28, 10), 722_800),
        (SuPerFedTwoCNN(), image(1, 28, 10), 721_200),
        (CharLSTM(biases=0, vocabulary=100), text(80), 821_024),
        (VGG9(), image(1, 28, 62), 1_718_416),
        (ResNet9(), image(3, 28, 100), 5_054_784),
        (MobileNet(), image(3, 64, 200), 364_480),
        (SimpleCNN(), image(3, 32, 10), 107_690),
        (SimpleCNN(), image(1, 28, 62), 45_054),
        (ResNet18(), image(3, 32, 10), 11_181_642),
        (SqueezeNet(version="1.0"), image(1, 28, 62), 767_230),
        (SqueezeNet(version="1.1"), image(1, 28, 62), 754_302),
        (VGG(depth=11, form="fedphp"), image(3, 32, 10), 9_225_600),
        (VGG(depth=11, form="fedphp"), image(3, 32, 100), 9_271_680),
        (VGG(depth=13, form="fedphp"), image(3, 32, 10), 9_404_992 + 5_120),
        (VGG(depth=16, form="fedphp"), image(3, 32, 10), 14_714_688 + 5_120),
        (VGG(depth=19, form="fedphp"), image(3, 32, 10), 20_024_384 + 5_120),
        (HarCNN(), InputSpec("image", (9, 1, 128), 6), 2_253_958),
        (HarCNN(), InputSpec("image", (9, 3, 256), 12), 4_354_188),  # PFLlib's windows of PAMAP2
        (M5(), InputSpec("image", (1, 1, 32_000), 10), 559_114),
        (TFCNN(), image(3, 32, 10), 66_560),
        (TFCNN(), image(3, 32, 100), 158_720),
        (TFCNN(form="tutorial"), image(3, 32, 10), 122_570),
        (TFCNN(form="fedphp_hidden"), image(3, 32, 10), 188_810),
        (TFCNN(form="fedphp_hidden"), image(3, 32, 100), 200_420),
        *((ReddiCNN(layers=m), image(1, 28, 62), n) for m, n in enumerate((700_670, 1_206_590, 1_055_102, 919_998), 1)),
        *(
            (CharLSTM(layers=m, biases=1), text(90), n)
            for m, n in enumerate((295_210, 820_522, 1_345_834, 1_871_146), 1)
        ),
        *(
            (CharLSTM(layers=m, biases=1), text(80), n)
            for m, n in enumerate((292_560, 817_872, 1_343_184, 1_868_496), 1)
        ),
        *(
            (CharLSTM(layers=m), text(80), n + 1024 * m)
            for m, n in enumerate((292_560, 817_872, 1_343_184, 1_868_496), 1)
        ),
        (VGG(depth=11), image(3, 32, 10), 9_750_922),
        (VGG(depth=13), image(3, 32, 10), 9_935_434),
        (VGG(depth=16), image(3, 32, 10), 15_245_130),
        (VGG(depth=19), image(3, 32, 10), 20_554_826),
    ],
)
def test_parameter_counts_are_those_of_the_papers(config: Architecture, spec: InputSpec, count: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in config.build(spec).parameters()) == count


@pytest.mark.parametrize(
    ("config", "spec", "sides"),
    [
        (SuPerFedCNN(), image(1, 28, 62), [24, 12, 8, 4, 3, 1]),
        (SuPerFedCNN(), image(3, 32, 10), [28, 14, 10, 5, 3, 1]),
        (SuPerFedCNN(), image(3, 64, 200), [60, 20, 16, 5, 4, 1]),
        (SuPerFedTwoCNN(), image(3, 28, 10), [26, 14, 12, 7]),
        (VGG9(), image(1, 28, 62), [28, 14, 14, 7, 7, 7, 3, 3, 3, 1]),
        (ResNet9(), image(3, 28, 100), [14, 7, 7, 7, 4, 2, 1]),
        (MobileNet(), image(3, 64, 200), [32, 30, 30, 14, 14, 6, 6, 4, 4, 1]),
        (SimpleCNN(), image(3, 32, 10), [28, 14, 12, 6, 6, 3]),
        (SimpleCNN(), image(1, 28, 62), [24, 12, 8, 4]),
        (TFCNN(), image(3, 32, 10), [32, 16, 16, 8, 8, 4]),
        (TFCNN(form="tutorial"), image(3, 32, 10), [30, 15, 13, 6, 4]),
        (ReddiCNN(), image(1, 28, 62), [26, 24, 12]),
    ],
)
def test_maps_have_the_sides_of_the_papers(config: Architecture, spec: InputSpec, sides: list[int]) -> None:
    with torch.device("meta"):
        model: Any = config.build(spec)
        found = []
        maps = torch.empty(2, *spec.shape)
        for layer in model.body:
            maps = layer(maps)
            if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AdaptiveAvgPool2d | ResidualBlock):
                found.append(maps.shape[-1])
    assert found == sides
