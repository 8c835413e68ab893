"""Models that come from timm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.zoo import TimmModel

COLOUR = InputSpec("image", (3, 32, 32), 5)
GREY = InputSpec("image", (1, 32, 32), 5)
torch.set_num_threads(1)


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm", reason="timm is not installed (extra timm)")


def images(spec: InputSpec) -> Tensor:
    return torch.rand(2, *spec.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet"])
def test_with_the_weights_of_a_file_it_computes_what_timm_computes(timm: Any, name: str, tmp_path: Path) -> None:
    """Layers of timm that normalize and then apply an activation keep both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = timm.create_model(name, num_classes=5).eval()
        for buffer in module.buffers():
            if buffer.dtype == torch.float32:
                buffer.copy_(torch.rand_like(buffer) + 0.5)  # running statistics that matter
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    network = TimmModel(architecture=name, weights=str(tmp_path / "weights.pt")).network(COLOUR)
    x = images(COLOUR)
    torch.testing.assert_close(network.logits(network.initialize(0), x), module(x), rtol=1e-4, atol=1e-5)
    assert network.head_names[0].startswith("head")


def test_normalization_is_replaced_and_the_activation_behind_it_stays(timm: Any) -> None:
    activations = []
    for norm in ("batch", "group"):
        model = TimmModel(architecture="test_efficientnet", norm=norm).build(COLOUR)  # type: ignore[arg-type]
        activations.append(sum(isinstance(layer, nn.SiLU) for layer in model.modules()))
        found = any(isinstance(layer, nn.GroupNorm) for layer in model.modules())
        assert found == (norm == "group")
        assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == (norm == "batch")
    assert activations[0] == activations[1] > 3
    for norm in ("batch", "group"):
        assert TimmModel(architecture="test_efficientnet", norm=norm).network(COLOUR).vectorizable  # type: ignore[arg-type]


def test_grey_images_are_repeated_and_images_may_be_resized(timm: Any) -> None:
    network = TimmModel(architecture="test_resnet").network(GREY)
    tree, x = network.initialize(0), images(GREY)
    coloured = TimmModel(architecture="test_resnet").network(COLOUR)
    torch.testing.assert_close(network.logits(tree, x), coloured.logits(tree, x.expand(-1, 3, -1, -1)))
    with pytest.raises(ModelError, match=r"vit_tiny_patch16_224 .resize=None. cannot be applied"):
        TimmModel(architecture="vit_tiny_patch16_224").network(COLOUR)
    assert TimmModel(architecture="test_vit", resize=160).network(COLOUR).logits(
        TimmModel(architecture="test_vit", resize=160).network(COLOUR).initialize(0), images(COLOUR)
    ).shape == (2, 5)


def test_pretrained_weights_that_cannot_be_had_are_named(timm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **options: Any) -> nn.Module:
        assert options["pretrained"]
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(ModelError, match=r"weights of test_resnet are neither in the cache.*no route to host"):
        TimmModel(architecture="test_resnet", weights="imagenet").network(COLOUR)


def test_what_timm_lacks_is_named(timm: Any) -> None:
    with pytest.raises(ModelError, match=r"timm has no model 'convnext_atom'.*did you mean 'convnext_atto'"):
        TimmModel(architecture="convnext_atom").network(COLOUR)
    with pytest.raises(ModelError, match="is not one linear layer at the end"):
        TimmModel(architecture="deit_tiny_distilled_patch16_224", resize=224).network(COLOUR)


def test_without_timm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"timm cannot be imported.*pip install 'rayfl\[timm\]'"):
        TimmModel(architecture="test_resnet").network(COLOUR)
