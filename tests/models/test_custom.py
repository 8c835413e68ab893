"""Users' own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config, to_yaml
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.models.zoo import Candidates, CustomModel, ModelConfig, TwoNN
from tests.support import own_models

torch.set_num_threads(1)

IMAGE = InputSpec("image", (1, 6, 2), 4)
X = torch.rand(3, 1, 6, 2, generator=torch.Generator().manual_seed(0))


def own(name: str, head: str | None = None) -> CustomModel:
    return CustomModel(factory=f"tests.support.own_models:{name}", head=head)


def test_an_ordinary_module_is_split_at_its_head() -> None:
    network = own("plain", "3").network(IMAGE)
    assert network.parameter_names == ("body.1.weight", "body.1.bias", "head.weight", "head.bias")
    assert network.head_names == network.classifier_names == ("head.weight", "head.bias")
    assert network.vectorizable and not network.stochastic
    torch.manual_seed(5)
    module = own_models.plain(IMAGE)
    features, logits = network.features_and_logits(network.initialize(5), X)
    assert torch.equal(features, module[:3](X)) and torch.equal(logits, module(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_of_another_type_is_trained_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = own_models.plain
    monkeypatch.setattr(own_models, "plain", lambda spec: plain(spec).to(dtype))
    network = own("plain", "3").network(IMAGE)
    model = network.initialize(5)
    torch.manual_seed(5)
    expected = own_models.plain(IMAGE).float()
    assert torch.equal(network.logits(model, X), expected(X))


def test_a_classification_model_says_its_parts_itself() -> None:
    network = own("Own").network(IMAGE)
    assert network.parameter_names == ("inner.weight", "inner.bias", "head.weight", "head.bias")
    assert network.buffer_names == ()
    assert network.vectorizable and network.why_not_vectorizable == ""


@pytest.mark.parametrize(
    ("name", "reason", "stochastic"),
    [
        ("Dropping", "draws random numbers", True),
        ("Mixing", "depend on the other samples", False),
        ("Branching", "vmap fails", False),
    ],
)
def test_what_cannot_be_vectorized_is_found_by_running_it(name: str, reason: str, stochastic: bool) -> None:
    network = own(name).network(IMAGE)
    assert not network.vectorizable and reason in network.why_not_vectorizable
    assert network.stochastic == stochastic
    state = torch.get_rng_state()
    own(name).network(IMAGE)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [
        ("plain", None, r"there are 1, 3: set model\.head=3"),
        ("plain", "2", "there are 1, 3"),
        ("plain", "1", "but not in two parts, its layer '1' after all others: head must name the layer that makes the"),
        ("pixelwise", "", "there is none"),
        ("Own", "head", "says itself"),
        ("Deviating", None, "forward is not"),
        ("scaled", "0.3", "'0.3' alone makes the logits"),
        ("unseeded", None, "generator"),
        ("few_classes", "1", r"needed are \(2, f\) and \(2, 4\)"),
        ("rows", "0", r"features of shape \(2, 1, 6, 2\)"),
        ("failing", None, "KeyError"),
        ("overwriting", "4", "cannot be trained: .*inplace operation"),
        ("lazy", "2", r"no sizes yet \(1.weight, 1.bias\).*spec.shape"),
        ("complex_layer", "3", "no imaginary part, and these parameters are complex: phase;"),
        ("Counting", None, "all clients would share it; .*register_buffer"),
        ("Listing", None, "would be trained in vain: .* not from a list"),
        ("Replacing", None, r"another tensor in the place of mean, .*: change it in place, as in self\.mean\.copy_"),
        ("nothing", None, "returned a NoneType"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(name: str, head: str | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as error:
        own(name, head).network(IMAGE)
    assert f"own_models:{name}" in str(error.value)


DRAWING_MODULE = """
import torch
from torch import nn

unused = torch.randn(5)

def fixed(spec):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 4))
    model[1].requires_grad_(False)
    return model
"""


def test_what_a_module_draws_when_it_is_imported_changes_no_initial_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_draws.py").write_text(DRAWING_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = CustomModel(factory="module_that_draws:fixed", head="2")
    network, again = model.network(IMAGE), model.network(IMAGE)
    assert torch.equal(network.logits(network.initialize(0), X), again.logits(again.initialize(0), X))


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [
        ("tied", "2", "its weight is also body.1.weight: .*a weight of its own"),
        ("normalized", "1", "its weight is computed of other tensors"),
    ],
)
def test_a_head_without_a_weight_of_its_own_is_refused_with_the_reason(name: str, head: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        own(name, head).network(InputSpec("image", (1, 6, 2), 12))


def test_inputs_it_cannot_take_and_names_it_cannot_find() -> None:
    with pytest.raises(ModelError, match=r"own_models:Own cannot be applied to .*3 x 5"):
        own("Own").network(InputSpec("image", (3, 5), 4))
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        own("plan").network(IMAGE)


def test_the_name_may_be_the_function() -> None:
    adapter: TypeAdapter[object] = TypeAdapter(ModelConfig)
    expected = own("plain", "3")
    short = {"name": expected.factory, "head": "3"}
    assert adapter.validate_python(short) == expected
    assert adapter.validate_json(expected.model_dump_json()) == expected
    mixed = adapter.validate_python({"name": "candidates", "candidates": [{"name": "two_nn"}, short]})
    assert mixed == Candidates(candidates=(TwoNN(), expected))
    for wrong in ({**short, "factory": "a:b"}, {"name": "a b:c"}, {"name": "a:b", "hidden": 3}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_it_can_be_named_on_the_command_line() -> None:
    overrides = ["model=tests.support.own_models:plain", "model.head='3'"]
    config = load_config(Experiment, "quickstart", overrides)
    assert config.model == own("plain", "3")
    assert "factory: tests.support.own_models:plain" in to_yaml(config)
