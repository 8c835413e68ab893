"""Nets on sound: M5 is the net of one-dimensional layers in the lengths of its paper; others take spectrograms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.zoo import M5, ModelConfig
from tests.support.zoo_inputs import image


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_one_dimensional_layers_do(channels: int, training: bool) -> None:
    torch.manual_seed(3)
    model = M5(width=3).build(InputSpec("image", (channels, 1, 700), 5)).train(training)
    layers: list[nn.Module] = []
    before = channels
    for width in (3, 3, 6, 12):
        convolution = nn.Conv1d(before, width, 3, padding=1) if layers else nn.Conv1d(before, width, 80, 4, 38)
        layers += [convolution, nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4, ceil_mode=True)]
        before = width
    plain = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, 5)).train(training)
    values = zip(plain.state_dict().items(), model.state_dict().values(), strict=True)
    plain.load_state_dict({name: value.reshape(own.shape) for (name, own), value in values})
    x = torch.randn(4, channels, 1, 700)
    torch.testing.assert_close(model(x), plain(x[:, :, 0]), rtol=1e-4, atol=1e-5)


def test_lengths_are_those_of_table_1() -> None:
    with torch.device("meta"):
        model = M5().build(InputSpec("image", (1, 1, 32_000), 10))
        maps, found = torch.empty(2, 1, 1, 32_000), []
        for layer in model.get_submodule("body").children():
            maps = layer(maps)
            if isinstance(layer, nn.MaxPool2d):
                found.append((maps.shape[1], maps.shape[-1]))
    assert found == [(128, 2000), (128, 500), (256, 125), (512, 32)]


def test_an_image_is_no_waveform() -> None:
    with pytest.raises(ModelError, match=r"model m5 needs waveforms, which have the shape \(channels, 1, times\), but"):
        M5().network(image(1, 28, 10))


def test_the_models_that_the_page_names_take_spectrograms() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    named = page.partition("grey images read them; of those in")[2].partition("and those of")[0]
    names = re.findall(r"`(\w+)`", named)
    assert len(names) == 14
    models: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    further = [{"name": "torchvision", "architecture": "resnet34"}, {"name": "timm", "architecture": "resnet10t"}]
    for content in [*({"name": name} for name in names), *further]:
        with torch.device("meta"):
            model = models.validate_python(content).build(InputSpec("image", (1, 40, 98), 35)).eval()
            assert model.classify(model.features(torch.zeros(2, 1, 40, 98))).shape == (2, 35)
