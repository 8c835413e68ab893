"""The U-Net: its shapes, what it can be stacked with, what it refuses, and users' own models of pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.networks.convolutional import TwoCNN
from rayfl.models.networks.perceptron import TwoNN
from rayfl.models.networks.unet import UNetModel
from rayfl.models.zoo import CustomModel
from tests.support import own_models

torch.set_num_threads(1)
FLAT = InputSpec("image", (2, 9, 6), 3, target="mask")
SOLID = InputSpec("image", (1, 5, 4, 7), 2, target="mask")


@pytest.mark.parametrize("spec", [FLAT, SOLID])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_pixel_has_logits_whatever_the_sides(spec: InputSpec, depth: int) -> None:
    network = UNetModel(width=4, depth=depth).network(spec)
    x = torch.randn(3, *spec.shape, generator=torch.Generator().manual_seed(0))
    features, logits = network.features_and_logits(network.initialize(0), x)
    assert features.shape == (3, *spec.shape[1:], 4) and logits.shape == (3, *spec.shape[1:], spec.num_classes)
    assert network.vectorizable and not network.stochastic and not network.batch_statistics
    assert network.head_shape == (spec.num_classes, 4)


@pytest.mark.parametrize("spec", [FLAT, SOLID])
def test_stacked_models_have_the_gradients_of_each(spec: InputSpec) -> None:
    network = UNetModel(width=2, depth=2).network(spec)
    x = torch.randn(2, 3, *spec.shape, generator=torch.Generator().manual_seed(0))
    models = [network.initialize(seed) for seed in (0, 1)]

    def loss(model: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return network.logits(model, x, training=True).log_softmax(-1)[..., 0].square().mean()

    stacked = vmap(grad(loss))({name: torch.stack([one[name] for one in models]) for name in models[0]}, x)
    for place, model in enumerate(models):
        for name, value in grad(loss)(model, x[place]).items():
            torch.testing.assert_close(stacked[name][place], value, rtol=1e-3, atol=1e-5)


def test_deeper_nets_read_from_farther_away() -> None:
    spec = InputSpec("image", (1, 64, 64), 2, target="mask")
    x = torch.zeros(1, 1, 64, 64, requires_grad=True)

    def reach(depth: int) -> int:
        module = UNetModel(width=4, depth=depth).build(spec)
        for owner in list(module.modules()):  # normalization reads all pixels, and ReLU is 0 at some
            for name, child in owner.named_children():
                if isinstance(child, nn.GroupNorm | nn.ReLU):
                    setattr(owner, name, nn.Identity())
        (found,) = torch.autograd.grad(module(x)[0, 32, 32, 0], x)
        return int((found[0, 0] != 0).sum())

    assert 25 < reach(1) < reach(2) < 64 * 64


@pytest.mark.parametrize(
    ("model", "spec", "words"),
    [
        (UNetModel(), InputSpec("image", (1, 8, 8), 3), r"with a class at each pixel, but .* one of 3 classes each"),
        (UNetModel(depth=4), InputSpec("image", (1, 8, 8), 3, target="mask"), r"at least 16 pixels for depth=4"),
        (UNetModel(), InputSpec("image", (8, 8), 3, target="mask"), r"needs images of shape \(channels, height"),
        (TwoCNN(), FLAT, r"two_cnn needs one target each \(unet .*one of 3 classes at each pixel"),
        (TwoNN(), SOLID, r"two_nn needs one target each \(unet .*one of 2 classes at each voxel"),
    ],
)
def test_what_does_not_fit_is_refused(model: UNetModel | TwoCNN | TwoNN, spec: InputSpec, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model.network(spec)


@pytest.mark.parametrize("spec", [FLAT, SOLID])
def test_the_last_convolution_of_a_users_model_is_its_head(spec: InputSpec) -> None:
    network = CustomModel(factory="tests.support.own_models:fully_convolutional", head="2").network(spec)
    assert network.head_shape == (spec.num_classes, 5) and network.vectorizable
    x = torch.randn(2, *spec.shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    module = own_models.fully_convolutional(spec)
    torch.testing.assert_close(network.logits(network.initialize(3), x), module(x).movedim(1, -1))


@pytest.mark.parametrize(
    ("head", "words"),
    [("0", r"\(or a convolution of one pixel\) that makes the logits; there are 2"), (None, "there are 2")],
)
def test_a_convolution_of_several_pixels_is_no_head(head: str | None, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        CustomModel(factory="tests.support.own_models:fully_convolutional", head=head).network(FLAT)


def test_a_model_that_makes_smaller_maps_is_refused() -> None:
    with pytest.raises(ModelError, match=r"needed are \(2, 9, 6, f\) and \(2, 9, 6, 3\)"):
        CustomModel(factory="tests.support.own_models:shrinking", head="1").network(FLAT)
