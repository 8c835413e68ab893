"""Hidden units: networks padded with zeros compute and train as cut-out ones, and what cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.parts.widths import Held, bytes_of, count_of, cut, merged, padded, weights_by_element, window
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.units import Axis, units_of
from rayfl.models.zoo import (
    TFCNN,
    VGG9,
    LeafCNN,
    ReddiCNN,
    ResNet9,
    ResNet18,
    SimpleCNN,
    SuPerFedTwoCNN,
    TabularMLP,
    TwoCNN,
    TwoNN,
)
from rayfl.params import Tree, num_bytes
from tests.support.toy_networks import recurrent_layers, two_layers
from tests.support.toys import assert_close, assert_equal

IMAGES = InputSpec("image", (3, 28, 28), 4)
MODELS: dict[str, Any] = {
    "two_nn": TwoNN(hidden=(9, 6)),
    "two_nn-three": TwoNN(hidden=(30, 20, 15), bias=False),
    "two_cnn": TwoCNN(),
    "two_cnn-no-padding": TwoCNN(padding=0),
    "leaf_cnn": LeafCNN(),
    "tf_cnn": TFCNN(),
    "reddi_cnn": ReddiCNN(dropout=False),
    "simple_cnn": SimpleCNN(),
    "superfed_two_cnn": SuPerFedTwoCNN(),
    "vgg9": VGG9(),
    "resnet9": ResNet9(),
    "resnet9-none": ResNet9(norm="none"),
    "resnet18": ResNet18(norm="batch_no_stats"),
}


def random_tree(network: Network, seed: int = 1) -> Tree:
    """Parameters in float64, none of them 0, small enough for deep networks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: leaf.double() + 0.02 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        for name, leaf in network.initialize(0).items()
    }


def some_units(sizes: tuple[int, ...], seed: int = 0) -> Held:
    """A third of the units of each layer, in no order."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randperm(size, generator=generator)[: count_of(size, 1 / 3)] for size in sizes)


def gradients(network: Network, tree: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tree]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
    logits = network.logits(leaves, x, training=True)
    found = torch.autograd.grad(F.cross_entropy(logits, y), list(leaves.values()))
    return logits.detach(), dict(zip(leaves, found, strict=True))


@pytest.mark.two_cases
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_network_trains_as_the_one_that_is_cut_out(name: str) -> None:
    """The module takes tensors of fewer units as they are: it then is the cut-out network."""
    network = MODELS[name].network(IMAGES)
    units, whole = network.units, random_tree(network)
    held = some_units(units.sizes)
    small = cut(whole, held, units)
    wide = padded(small, held, units)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *IMAGES.shape, generator=generator, dtype=torch.float64)
    logits, slopes = gradients(network, small, x, torch.tensor([0, 3, 1]))
    found, wide_slopes = gradients(network, wide, x, torch.tensor([0, 3, 1]))
    assert_close(found, logits, 1e-10)
    assert_close(cut(wide_slopes, held, units), slopes, 1e-10)
    assert_equal(padded(cut(wide_slopes, held, units), held, units), wide_slopes)  # of the others 0, to the bit
    assert any(leaf.abs().max() > 1e-4 for leaf in slopes.values())
    assert sum(leaf.numel() for leaf in small.values()) < 0.4 * network.num_parameters
    assert bytes_of(whole, held, units) == num_bytes(small)
    assert {name: leaf.shape for name, leaf in wide.items()} == {name: leaf.shape for name, leaf in whole.items()}


def test_the_cut_out_perceptron_by_hand() -> None:
    network = TwoNN(hidden=(8, 6)).network(InputSpec("image", (5,), 3))
    units, tree = network.units, random_tree(network)
    assert units.sizes == (8, 6)
    held = (torch.tensor([1, 4, 7]), torch.tensor([0, 5]))
    x = torch.randn(4, 5, dtype=torch.float64)
    one, two = held
    hidden = torch.relu(x @ tree["hidden.0.weight"][one].T + tree["hidden.0.bias"][one])
    hidden = torch.relu(hidden @ tree["hidden.1.weight"][two][:, one].T + tree["hidden.1.bias"][two])
    expected = hidden @ tree["head.weight"][:, two].T + tree["head.bias"]
    assert_close(network.logits(padded(cut(tree, held, units), held, units), x), expected, 1e-12)


def test_the_cut_out_convolutional_net_by_hand() -> None:
    """Channels of a map are blocks of 7 x 7 inputs of the linear layer."""
    network = TwoCNN().network(InputSpec("image", (1, 28, 28), 3))
    units, tree = network.units, random_tree(network)
    assert units.sizes == (32, 64, 512) and units.axes["fc.weight"] == (Axis(2, 1), Axis(1, 49))
    held = some_units(units.sizes)
    x = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    one, two, three = held
    maps = F.max_pool2d(F.relu(F.conv2d(x, tree["conv1.weight"][one], tree["conv1.bias"][one], padding=2)), 2)
    maps = F.conv2d(maps, tree["conv2.weight"][two][:, one], tree["conv2.bias"][two], padding=2)
    maps = F.max_pool2d(F.relu(maps), 2).flatten(1)
    rows = tree["fc.weight"].reshape(512, 64, 49)[three][:, two].flatten(1)
    expected = F.relu(maps @ rows.T + tree["fc.bias"][three]) @ tree["head.weight"][:, three].T + tree["head.bias"]
    assert_close(network.logits(padded(cut(tree, held, units), held, units), x), expected, 1e-12)


class Grouped(ClassificationModel):
    """Convolutions with group normalization of four channels each, around a residual connection."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(width // 4, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 4)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return F.adaptive_avg_pool2d(torch.relu(x + self.second(x)), 1).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def test_channels_that_are_normalized_together_are_one_unit() -> None:
    """And maps that are added have the same units. The narrow module has fewer groups of as many channels."""
    network, narrow = Network(Grouped), Network(lambda: Grouped(8))
    units, tree = network.units, random_tree(network)
    assert units.sizes == (3,) and units.axes["second.weight"] == (Axis(0, 4), Axis(0, 4))
    assert units.outputs == {"first.weight", "first.bias", "second.weight", "second.bias"}
    held = (torch.tensor([2, 0]),)
    small, x = cut(tree, held, units), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    logits, slopes = gradients(narrow, small, x, torch.tensor([0, 2]))
    found, wide = gradients(network, padded(small, held, units), x, torch.tensor([0, 2]))
    assert_close(found, logits, 1e-12)
    assert_close(cut(wide, held, units), slopes, 1e-12)
    assert_equal(padded(cut(wide, held, units), held, units), wide)


def test_inputs_and_classes_stay_whole() -> None:
    for model in MODELS.values():
        network = model.network(IMAGES)
        first, units = network.parameter_names[0], network.units
        assert units.axes[first][1] is None and units.axes[network.head_weight][0] is None
        assert units.axes[network.head_weight][1] is not None
        assert tuple(units.axes) == network.parameter_names
    table = TabularMLP().network(InputSpec("image", (12,), 3))
    assert table.units.sizes == (64, 32)
    assert two_layers().network.units.sizes == (7,)


class Layered(ClassificationModel):
    """Linear layers around something else."""

    def __init__(self, between: Any, frozen: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.between = between if isinstance(between, nn.Module) else nn.Identity()
        self.function = between if not isinstance(between, nn.Module) else lambda x: x
        self.head = nn.Linear(6, 3)
        self.inner.weight.requires_grad_(not frozen)

    def features(self, x: Tensor) -> Tensor:
        return self.function(self.between(self.inner(x)))  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Twice(Layered):
    def features(self, x: Tensor) -> Tensor:
        return self.between(torch.relu(self.between(self.inner(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Layered(nn.BatchNorm1d(6)), r"'between' keeps running statistics.*model\.norm=group"),
        (Layered(nn.LayerNorm(6)), "LayerNorm"),
        (Layered(nn.Sigmoid()), "Sigmoid"),
        (Layered(lambda x: torch.softmax(x, -1)), "softmax"),
        (Layered(lambda x: torch.cat([x, x])), "cat"),
        (Layered(lambda x: x.view(-1, 6)), "view"),
        (Layered(lambda x: x if x.sum() > 0 else -x), "cannot be followed"),
        (Layered(lambda x: F.max_pool1d(x, 1)), "max_pool1d"),
        (Layered(nn.ReLU(), frozen=True), "requires_grad=False"),
        (Layered(nn.BatchNorm1d(6, affine=False, track_running_stats=False)), "has no scale"),
        (Twice(nn.Linear(6, 6)), "used twice"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model: Any, words: str) -> None:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with pytest.raises(ModelError, match=words):
        units_of(model.eval(), trained)


def test_a_recurrent_net_is_refused() -> None:
    with pytest.raises(ModelError):
        _ = recurrent_layers().network.units


def test_windows_and_counts() -> None:
    assert [count_of(30, width) for width in (1.0, 0.1, 0.2, 0.5, 0.01)] == [30, 3, 6, 15, 1]
    assert [count_of(7, width) for width in (0.5, 0.25, 1 / 16)] == [4, 2, 1]
    units = two_layers().network.units
    assert [window(units, 0.5, start)[0].tolist() for start in (0, 5, 13)] == [[0, 1, 2, 3], [5, 6, 0, 1], [6, 0, 1, 2]]


def test_means_are_over_those_who_have_an_element() -> None:
    network = two_layers().network
    units, old = network.units, random_tree(network, 0)
    trees = [random_tree(network, seed) for seed in (1, 2)]
    held = [(torch.tensor([0, 1, 2]),), (torch.tensor([2, 5]),)]
    having = weights_by_element(held, [3, 1], units, old)
    sent = [padded(cut(tree, own, units), own, units) for tree, own in zip(trees, held, strict=True)]
    mean = {name: (3 * sent[0][name] + sent[1][name]) / 4 for name in old}
    found = merged(old, mean, having, 4.0)
    one, two = trees
    for unit, expected in {
        0: one["inner.weight"][0],
        2: (3 * one["inner.weight"][2] + two["inner.weight"][2]) / 4,
        5: two["inner.weight"][5],
        6: old["inner.weight"][6],
    }.items():
        assert_close(found["inner.weight"][unit], expected, 1e-14)
    assert_close(found["head.weight"][:, 5], two["head.weight"][:, 5], 1e-14)
    assert_equal(found["head.weight"][:, 4], old["head.weight"][:, 4])
    assert_close(found["head.bias"], (3 * one["head.bias"] + two["head.bias"]) / 4, 1e-14)
