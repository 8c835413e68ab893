"""Models that come from torchvision, and their weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.zoo import ResNet18, SqueezeNet, TorchvisionModel

models = pytest.importorskip("torchvision.models")
torch.set_num_threads(1)

COLOUR = InputSpec("image", (3, 32, 32), 5)
GREY = InputSpec("image", (1, 32, 32), 5)


def images(spec: InputSpec) -> Tensor:
    return torch.rand(2, *spec.shape, generator=torch.Generator().manual_seed(0))


def made(name: str, classes: int) -> nn.Module:
    """torchvision's own model in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return models.get_model(name, num_classes=classes).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ResNet18, "resnet18"),
        (SqueezeNet, "squeezenet1_1"),
        (TorchvisionModel, "shufflenet_v2_x0_5"),
        (TorchvisionModel, "mobilenet_v3_small"),
    ],
)
@pytest.mark.parametrize("suffix", [pytest.param(".pt", marks=pytest.mark.slow), ".safetensors"])
@pytest.mark.two_cases
def test_with_the_weights_of_a_file_it_computes_what_torchvision_computes(
    config: Any, name: str, suffix: str, tmp_path: Path
) -> None:
    module, file = made(name, 5), tmp_path / f"weights{suffix}"
    (torch.save if suffix == ".pt" else save_file)(module.state_dict(), file)
    options = {"architecture": name} if config is TorchvisionModel else {}
    network = config(weights=str(file), **options).network(COLOUR)
    x = images(COLOUR)
    torch.testing.assert_close(network.logits(network.initialize(0), x), module(x))


@pytest.mark.slow
def test_a_head_for_other_classes_is_new(tmp_path: Path) -> None:
    module, file = made("resnet18", 7), tmp_path / "weights.pt"
    torch.save(module.state_dict(), file)
    network = ResNet18(weights=str(file)).network(COLOUR)
    one, other = network.initialize(1), network.initialize(2)
    assert torch.equal(one["body.conv1.weight"], module.state_dict()["conv1.weight"])
    assert torch.equal(one["body.conv1.weight"], other["body.conv1.weight"])
    assert one["head.weight"].shape == (5, 512) and not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(ResNet18(weights="imagenet"), "resnet18", marks=pytest.mark.slow),
        (SqueezeNet(weights="imagenet"), "squeezenet1_1"),
    ],
)
def test_imagenet_weights_with_a_new_head(config: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = made(name, 1000).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: state)
    tree = config.network(COLOUR).initialize(1)
    kept = {key: value for key, value in tree.items() if not key.startswith("head.")}
    for key, value in kept.items():
        source = key.removeprefix("body.") if name == "resnet18" else key.replace("body.", "features.")
        assert torch.equal(value, state[source]), key
    assert tree["head.weight"].shape == (5, 512)
    thousand = config.network(InputSpec("image", (3, 32, 32), 1000)).initialize(1)["head.weight"]
    assert not any(value.shape == thousand.shape and torch.equal(value, thousand) for value in state.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_imagenet_weights_of_models_with_heads_for_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are torchvision's, which brings such weights' inputs to another scale itself."""
    torch.manual_seed(0)
    state = models.get_model(name, weights=None, aux_logits=True, init_weights=False).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: state)
    spec = InputSpec("image", (3, 96, 96), 5)
    network = TorchvisionModel(architecture=name, weights="imagenet").network(spec)
    theirs, x = models.get_model(name, weights="DEFAULT"), torch.rand(2, 3, 96, 96)
    assert theirs.transform_input
    theirs.fc = nn.Identity()
    with torch.no_grad():
        expected, scale = theirs.eval()(x), float(theirs(x).abs().max())
        torch.testing.assert_close(network.features(network.initialize(0), x), expected, rtol=1e-5, atol=1e-5 * scale)
    assert not any("aux" in key.lower() for key in network.initialize(0))


def test_weights_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refused)
    with pytest.raises(ModelError, match=r"resnet18.*cache.*no route to host"):
        ResNet18(weights="imagenet").network(COLOUR)
    damaged, other, listed = (tmp_path / name for name in ("damaged.pt", "other.pt", "list.pt"))
    damaged.write_bytes(b"damaged")
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    torch.save(made("shufflenet_v2_x0_5", 5).state_dict(), other)
    torch.save({"state_dict": {}}, listed)
    for file, reason in [
        (tmp_path / "none.pt", "is no file"),
        (damaged, "cannot be read"),
        (tmp_path / "damaged.safetensors", "cannot be read"),
        (other, "do not fit: missing"),
        (listed, "no state dict"),
    ]:
        with pytest.raises(ModelError, match=reason) as error:
            ResNet18(weights=str(file)).network(COLOUR)
        assert str(file) in str(error.value)


@pytest.mark.slow
def test_grey_images_are_repeated_and_all_are_resized() -> None:
    grey = ResNet18().network(GREY)
    tree, x = grey.initialize(0), images(GREY)
    assert torch.equal(grey.logits(tree, x), ResNet18().network(COLOUR).logits(tree, x.repeat(1, 3, 1, 1)))
    large = torch.nn.functional.interpolate(x, (64, 64), mode="bilinear", antialias=True)
    resized = ResNet18(resize=64).network(GREY)
    torch.testing.assert_close(resized.logits(tree, x), grey.logits(tree, large))


def test_squeezenet_cannot_be_mistaken_for_a_net_with_a_linear_layer() -> None:
    network = TorchvisionModel(architecture="squeezenet1_0").network(COLOUR)
    tree = network.initialize(0)
    features = network.features_and_logits(tree, images(COLOUR))[0]
    assert network.feature_channels == 512 and features.shape[1] % 512 == 0
    assert tree[network.head_weight].shape == (5, 512)


@pytest.mark.slow
def test_normalization_is_replaced_where_there_is_some() -> None:
    group = ResNet18(norm="group").network(GREY)
    assert (
        group.buffer_names == ()
        and group.vectorizable
        and group.num_parameters == ResNet18().network(GREY).num_parameters
    )
    with pytest.raises(ModelError, match="norm is group, but squeezenet1_1 has no batch normalization"):
        SqueezeNet(norm="group").network(GREY)


def test_stochastic_depth_is_noticed() -> None:
    network = TorchvisionModel(architecture="efficientnet_b0", norm="none").network(COLOUR)
    assert network.stochastic and not network.vectorizable


def test_what_a_model_cannot_take_is_said() -> None:
    with pytest.raises(ModelError, match="did you mean 'resnet50'"):
        TorchvisionModel(architecture="resnet5").network(COLOUR)
    with pytest.raises(ModelError, match=r"squeezenet1_1 \(resize=None\) cannot be applied to .*3 x 8 x 8"):
        SqueezeNet().network(InputSpec("image", (3, 8, 8), 5))


def test_a_torchvision_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> Any:
        raise RuntimeError(f"operator torchvision::nms does not exist in {name}")

    monkeypatch.setattr(importlib, "import_module", refused)
    with pytest.raises(ModelError, match=r"nms does not exist.*pip install --upgrade torch torchvision"):
        ResNet18().network(COLOUR)
