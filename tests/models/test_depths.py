"""Stages of networks: what each has, that running them is running the network, and what cannot be cut is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.zoo import VGG9, ResNet9, SimpleCNN, TwoCNN, TwoNN
from tests.support.toy_networks import recurrent_layers, softmax_regression
from tests.support.toys import assert_equal

IMAGES = InputSpec("image", (3, 32, 32), 4)
MODELS: dict[str, tuple[Any, list[int]]] = {
    "two_nn": (TwoNN(hidden=(9, 7, 5)), [9, 7, 5]),
    "two_cnn": (TwoCNN(), [32, 64, 512]),
    "simple_cnn": (SimpleCNN(), [16, 32, 64, 128]),
    "vgg9": (VGG9(), [16, 32, 64, 128, 256, 512, 256]),
    "resnet9": (ResNet9(norm="batch"), [64, 64, 64, 128, 256, 512, 256]),
    "resnet9-group": (ResNet9(norm="group"), [64, 64, 64, 128, 256, 512, 256]),
}


@pytest.mark.parametrize("name", MODELS)
def test_stages_run_as_the_network_does(name: str) -> None:
    architecture, widths = MODELS[name]
    network = architecture.network(IMAGES)
    tree, x = network.initialize(3), torch.randn(4, 3, 32, 32)
    stages = network.depths.stages
    assert [stage.width for stage in stages] == widths
    names = [one for stage in stages for one in stage.names]
    assert sorted(names) == sorted({*tree} - {*network.head_names}) and len(names) == len(set(names))
    every = network.walked(tree, x, partial(network.depths.read, exits=range(len(stages)), whole=True))
    assert [tuple(one.shape) for one in every] == [(4, width) for width in widths] + [(4, 4)]
    assert_equal(every[-1], network.logits(tree, x))
    known = {}
    for number, stage in enumerate(stages):
        known |= {one: tree[one] for one in stage.names}  # what is deeper is not needed
        found = network.walked(known, x, partial(network.depths.read, exits=[number], whole=False))
        assert_equal(found[0], every[number])


def test_a_classifier_reads_what_follows_activation_and_pooling() -> None:
    network = TwoCNN().network(IMAGES)
    tree, x = network.initialize(0), torch.randn(2, 3, 32, 32)
    maps = F.max_pool2d(F.relu(F.conv2d(x, tree["conv1.weight"], tree["conv1.bias"], padding=2)), 2)
    found = network.walked(tree, x, partial(network.depths.read, exits=[0], whole=False))
    assert torch.allclose(found[0], maps.mean((2, 3)), atol=1e-6)


def test_statistics_of_stages_that_are_not_run_stay_as_they_are() -> None:
    network = ResNet9(norm="batch").network(IMAGES)
    tree = network.initialize(0)
    before = {name: leaf.clone() for name, leaf in tree.items()}
    network.walked(tree, torch.randn(4, 3, 32, 32), partial(network.depths.read, exits=[3], whole=False), training=True)
    changed = {name for name in tree if not torch.equal(tree[name], before[name])}
    assert changed and changed < {name for stage in network.depths.stages[:4] for name in stage.names}


class _Twice(ClassificationModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(F.relu(self.inner(x))))

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class _Beside(_Twice):
    def features(self, x: Tensor) -> Tensor:
        return x + F.relu(self.inner(x))


class _Dropped(_Twice):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(self.inner(x)), training=self.training)


class _Scaled(_Twice):
    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x))

    def classify(self, features: Tensor) -> Tensor:
        return super().classify(features).tanh()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_Twice, "'inner.weight' is used twice"),
        (_Beside, "with add it is not known"),
        (_Dropped, "with dropout it is not known"),
        (_Scaled, "its outputs are not those of one linear layer"),
    ],
)
def test_what_cannot_be_cut_is_named(factory: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _ = Network(factory).depths


def test_recurrent_and_linear_models_have_no_stages() -> None:
    for network in (recurrent_layers(), softmax_regression()):
        with pytest.raises(ModelError):
            _ = network.network.depths
