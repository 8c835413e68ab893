"""Layers with factors: what weights are composed of, of how many numbers, of which rank, and where they begin."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.layers.factors import Factorized, factorize, rank_of, size_of
from rayfl.models.networks.vgg import VGG
from tests.support.factorized_toys import factorized_layers, logits_of

COMPOSITIONS = ("fedpara", "pfedpara", "low_rank")
LAYERS: dict[str, Any] = {
    "linear": partial(nn.Linear, 40, 30),
    "no bias": partial(nn.Linear, 40, 30, bias=False),
    "sequences": partial(nn.Conv1d, 24, 20, 5, padding=2),
    "images": partial(nn.Conv2d, 12, 16, (3, 5), stride=2, padding=1, padding_mode="circular"),
    "one pixel": partial(nn.Conv2d, 40, 30, 1),
    "volumes": partial(nn.Conv3d, 6, 8, 3, dilation=2),
}
INPUTS = {
    "linear": (4, 40),
    "no bias": (4, 40),
    "sequences": (2, 24, 11),
    "images": (2, 12, 9, 9),
    "one pixel": (2, 40, 3, 3),
    "volumes": (2, 6, 7, 6, 5),
}


class OneLayer(ClassificationModel):
    """A layer, and a head that nothing reaches."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(2, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return features


def with_factors(layer: nn.Module, composition: Any, gamma: float = 0.5) -> Any:
    """The layer, which must be one that has factors."""
    assert factorize(OneLayer(layer), composition, gamma, "hidden") == 1
    return layer.double()


def composed(layer: Any, composition: str) -> Tensor:
    """The weight by loops over both ranks and all places of the kernel."""
    shape = [layer._parameters["weight_x1"].shape[0], layer._parameters["weight_y1"].shape[0]]
    kernel = tuple(getattr(layer, "kernel_size", ()))

    def product(which: int) -> Tensor:
        x, y = getattr(layer, f"weight_x{which}"), getattr(layer, f"weight_y{which}")
        core = getattr(layer, f"weight_t{which}", None)
        ranks = range(x.shape[1])
        if core is None:
            return torch.stack([torch.outer(x[:, r], y[:, r]) for r in ranks]).sum(0).reshape(*shape, *kernel)
        places = []
        for place in itertools.product(*map(range, kernel)):
            at = torch.stack([torch.stack([core[(a, b, *place)] for b in ranks]) for a in ranks])
            places.append(x @ at @ y.T)
        return torch.stack(places, -1).reshape(*shape, *kernel)

    if composition == "low_rank":
        return product(1)
    return product(1) * (product(2) + 1) if composition == "pfedpara" else product(1) * product(2)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_is_that_of_the_formula_and_so_are_outputs_and_gradients(kind: str, composition: str) -> None:
    torch.manual_seed(0)
    plain = LAYERS[kind]()
    layer = with_factors(LAYERS[kind](), composition)
    expected = composed(layer, composition)
    assert torch.allclose(layer.weight, expected, rtol=0, atol=1e-12)
    assert layer.weight.shape == plain.weight.shape
    assert (layer.bias is None) == (plain.bias is None)
    assert isinstance(layer, type(plain))

    inputs = torch.randn(INPUTS[kind], dtype=torch.float64)
    plain = plain.double()
    with torch.no_grad():
        plain.weight.copy_(expected)
        if plain.bias is not None:
            plain.bias.copy_(layer.bias)
    outputs = layer(inputs)
    assert torch.allclose(outputs, plain(inputs), rtol=0, atol=1e-12)

    factors = [tensor for name, tensor in layer.named_parameters() if name != "bias"]
    slopes = torch.autograd.grad(outputs.square().sum(), factors, retain_graph=True)
    of_weight = torch.autograd.grad(plain(inputs).square().sum(), plain.weight)[0]
    independent = torch.autograd.grad((of_weight * composed(layer, composition)).sum(), factors)
    for one, other in zip(slopes, independent, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("layers", ["hidden", "all"])
def test_a_network_computes_what_its_composed_weights_do(composition: str, layers: str) -> None:
    task = factorized_layers(composition, gamma=1, layers=layers)
    tree = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(1).items()}
    assert ("head.weight_y1" in tree) == (layers == "all")
    x = torch.randn(6, 5, dtype=torch.float64)
    ours, theirs = task.network.logits(tree, x), logits_of(tree, x, composition)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    slopes = (torch.autograd.grad(F.cross_entropy(found, y), list(tree.values())) for found in (ours, theirs))
    for one, other in zip(*slopes, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_sizes_and_ranks_are_those_of_the_papers_first_table() -> None:
    """Layers of 256 to 256 units or channels, R = 16: 66K and 590K numbers become 16K and 21K."""
    assert size_of((256, 256), 16, 2) == 2 * 16 * (256 + 256) == 16384
    assert size_of((256, 256, 3, 3), 16, 2) == 2 * 16 * (256 + 256 + 16 * 9) == 20992
    assert rank_of((256, 256), 0) == rank_of((256, 256, 3, 3), 0) == 16
    layer = with_factors(nn.Linear(256, 256), "fedpara", 0)
    assert torch.linalg.matrix_rank(layer.weight) == 256
    assert torch.linalg.matrix_rank(layer.weight_x1 @ layer.weight_y1.T) == 16
    layer = with_factors(nn.Linear(256, 256), "low_rank", 0)
    assert torch.linalg.matrix_rank(layer.weight) == 32
    assert sum(tensor.numel() for name, tensor in layer.named_parameters() if name != "bias") == 16384
    layer = with_factors(nn.Conv2d(100, 81, 3), "fedpara", 0)
    assert layer.weight_t1.shape == (9, 9, 3, 3)
    unfolded = layer.weight.flatten(2)
    assert [int(torch.linalg.matrix_rank(unfolded[..., place])) for place in range(9)] == [81] * 9


@pytest.mark.parametrize(("rank", "size"), [(36, 60192), (75, 178050), (103, 296434), (126, 414792), (146, 533192)])
def test_sizes_are_those_that_the_authors_notebook_prints(rank: int, size: int) -> None:
    """Of convolutions of 256 to 256 channels and 3 x 3 pixels, 589,824 numbers."""
    assert size_of((256, 256, 3, 3), rank, 2) == size


@pytest.mark.parametrize(("gamma", "classes", "millions"), [(0.1, 10, 1.55), (0.4, 100, 4.53)])
def test_the_papers_vgg16_has_as_many_parameters_as_there(gamma: float, classes: int, millions: float) -> None:
    """Its linear layers have no factors, and its group normalization has two numbers for each of 4,224 channels."""
    section: dict[str, Any] = {"name": "fedpara", "gamma": gamma, "layers": "convolutions"}
    network = VGG(depth=16, factorize=section).network(InputSpec("image", (3, 32, 32), classes))  # type: ignore[arg-type]
    assert round((network.num_parameters + 2 * 4224) / 1e6, 2) == millions


@pytest.mark.parametrize("shape", [(64, 784), (200, 200), (10, 64), (16, 3, 3, 3), (32, 1, 5, 5), (64, 32, 5, 5)])
def test_the_rank_lies_between_full_rank_and_the_size_of_the_weight(shape: tuple[int, ...]) -> None:
    least, most = rank_of(shape, 0), rank_of(shape, 1)
    assert least is not None
    assert most is not None
    assert least**2 >= min(shape[:2]) > (least - 1) ** 2
    assert size_of(shape, most, 2) < math.prod(shape) <= size_of(shape, most + 1, 2)
    ranks = [rank_of(shape, gamma / 10) for gamma in range(11)]
    assert ranks == sorted(ranks, key=lambda rank: rank or 0)
    assert rank_of(shape, 0.5) == math.ceil((least + most) / 2)


def test_layers_that_gain_nothing_stay_as_they_are() -> None:
    assert rank_of((5, 24), 0.5) is None
    assert rank_of((1, 1), 1) is None
    frozen, tied = nn.Linear(30, 30), nn.Linear(30, 30)
    frozen.weight.requires_grad_(False)

    class Own(nn.Linear):
        pass

    others = (nn.Conv2d(32, 32, 3, groups=32), nn.ConvTranspose2d(30, 30, 3), Own(30, 30), nn.LSTM(30, 30))
    body = nn.Sequential(nn.Linear(5, 24), frozen, tied, nn.Linear(30, 30), *others)
    body[3].weight = tied.weight
    model = OneLayer(body)
    model.head = nn.Linear(30, 30)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layers in ("hidden", "convolutions"):
        assert factorize(model, "fedpara", 0.5, layers) == 0  # type: ignore[arg-type]
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert factorize(model, "fedpara", 0.5, "all") == 1
    assert [name for name, module in model.named_modules() if isinstance(module, Factorized)] == ["head"]


def test_a_layer_that_is_there_twice_stays_as_it_is() -> None:
    layer = nn.Linear(30, 30)
    assert factorize(OneLayer(nn.Sequential(layer, nn.ReLU(), layer)), "pfedpara", 0.5, "hidden") == 0
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["linear", "convolution", "xavier", "zeros"])
@pytest.mark.two_cases
def test_a_composed_weight_begins_with_the_mean_square_of_the_weight_it_replaces(
    kind: str, gamma: float, composition: str
) -> None:
    wanted, found = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        layer: Any = nn.Conv2d(40, 60, 3) if kind == "convolution" else nn.Linear(160, 120)
        if kind == "xavier":
            nn.init.xavier_normal_(layer.weight)
        if kind == "zeros":
            nn.init.zeros_(layer.weight)
        wanted.append(2 / 160 if kind == "zeros" else float(layer.weight.detach().square().mean()))
        weight = with_factors(layer, composition, gamma).weight.detach()
        found.append(float(weight.square().mean()))
        assert abs(float(weight.mean())) < 0.2 * wanted[-1] ** 0.5
    assert sum(found) / sum(wanted) == pytest.approx(1, abs=0.08)


def test_other_layers_begin_as_in_the_model_without_factors() -> None:
    spec = InputSpec("image", (3, 32, 32), 10)
    plain = VGG(depth=11).network(spec).initialize(3)
    found = VGG(depth=11, factorize="fedpara").network(spec).initialize(3)  # type: ignore[arg-type]
    common = plain.keys() & found.keys()
    assert {"head.weight", "head.bias", "body.0.bias"} <= common
    assert all(torch.equal(plain[name], found[name]) for name in common)
    again = VGG(depth=11, factorize="fedpara").network(spec)  # type: ignore[arg-type]
    assert all(torch.equal(again.initialize(3)[name], found[name]) for name in found)


def test_a_layers_factors_are_one_group_of_a_networks_layers() -> None:
    network = factorized_layers("pfedpara").network
    assert isinstance(network, Network)
    names = ("weight_x1", "weight_y1", "weight_x2", "weight_y2", "bias")
    layers = [tuple(f"{layer}.{name}" for name in names) for layer in ("hidden.1", "head")]
    assert network.layers == (("hidden.0.weight", "hidden.0.bias"), *layers)
    assert network.groups == {"own_factors": tuple(one for layer in layers for one in layer[2:4])}
    assert network.head_names == layers[1]
    assert network.head_shape == (9, 24)
    assert factorized_layers("fedpara").network.groups == {}
