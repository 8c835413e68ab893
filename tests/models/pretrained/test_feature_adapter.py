"""Networks on CLIP's features of images are those of plain modules of PyTorch, and are refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import vmap

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.models.pretrained.mixing import side_by_side
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter, export_merged, export_model
from rayfl.runs.folder import open_run
from tests.support.adapter_runs import experiment as over_vit
from tests.support.bases import inputs, network, trained
from tests.support.clips import NO_HEAD, PROMPT, clip_base, clip_network, wide_network, wide_reference

FIXED = {"context": "none", "template": "a photo of a {}."}
CONTEXT, WIDTH = "model.texts.context", 32
ATTENTION, RESIDUAL = {"name": "features"}, {"name": "features", "form": "residual", "reduction": 3, "ratio": 0.4}
FORMS = pytest.mark.parametrize("adapter", [ATTENTION, RESIDUAL], ids=["attention", "residual"])


def plain(adapter: dict[str, Any], tree: dict[str, Tensor]) -> Any:
    """The adapter as modules of PyTorch with the values of a tree, as a function of features."""
    own = {name.removeprefix("model.feature_adapter."): leaf.detach() for name, leaf in tree.items()}
    attention = adapter == ATTENTION
    first, second = (
        nn.Linear(one.shape[1], one.shape[0], bias=attention, dtype=torch.float64)
        for one in (own["first.weight"], own["second.weight"])
    )
    middle, last = (nn.Tanh(), nn.Softmax(dim=1)) if attention else (nn.ReLU(), nn.ReLU())
    net = nn.Sequential(first, middle, second, last)
    keys = {"first": "0", "second": "2"}
    net.load_state_dict(
        {f"{keys[name.partition('.')[0]]}.{name.partition('.')[2]}": leaf for name, leaf in own.items()}
    )
    if attention:
        return net, lambda f: net(f) * f
    return net, lambda f: 0.4 * net(f) + 0.6 * f


def logits_of(adapted: Any, x: Tensor) -> Tensor:
    """What transformers' own towers make of images with features changed by a function, in float64."""
    model, tokenizer = wide_reference()
    texts = tokenizer([f"a photo of a {name}." for name in NAMES], padding=True, return_tensors="pt")["input_ids"]
    t = model.get_text_features(input_ids=texts).pooler_output
    f = adapted(model.get_image_features(pixel_values=x).pooler_output)
    return model.logit_scale.exp() * F.normalize(f, dim=-1) @ F.normalize(t, dim=-1).T


@FORMS
def test_logits_and_steps_are_those_of_plain_modules(adapter: dict[str, Any]) -> None:
    """A context as words of the template stands still beside them, since a head without one is float32."""
    net, x, y = wide_network({"start": "template"}, adapter=adapter), inputs("vit", 6, 1).double(), torch.arange(6)
    whole = net.initialize(3)
    words = {CONTEXT: whole.pop(CONTEXT)}
    tree = {name: leaf + 0.2 * torch.sin(torch.arange(leaf.numel())).view(leaf.shape) for name, leaf in whole.items()}
    modules, adapted = plain(adapter, tree)
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.05)
    for _ in range(3):
        torch.testing.assert_close(net.logits(tree | words, x), logits_of(adapted, x), rtol=0, atol=1e-10)
        tree = {name: leaf.detach().requires_grad_() for name, leaf in tree.items()}
        loss = F.cross_entropy(net.logits(tree | words, x, training=True), y)
        gradients = torch.autograd.grad(loss, list(tree.values()))
        tree = {n: leaf.detach() - 0.05 * g for (n, leaf), g in zip(tree.items(), gradients, strict=True)}
        optimizer.zero_grad()
        F.cross_entropy(logits_of(adapted, x), y).backward()
        optimizer.step()
    fresh, _ = plain(adapter, tree)
    for one, other in zip(fresh.parameters(), modules.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@FORMS
def test_stacked_clients_have_adapters_of_their_own(adapter: dict[str, Any]) -> None:
    net, x = clip_network({"context": "none"}, adapter=adapter), inputs("vit", 8, 2).view(2, 4, 1, 8, 8)
    one, other = trained(net, 0), trained(net, 1)
    both = {name: torch.stack([one[name], other[name]]) for name in one}
    found = vmap(net.logits)(both, x)
    torch.testing.assert_close(found[0], net.logits(one, x[0]), rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1], net.logits(other, x[1]), rtol=0, atol=2e-5)
    assert not torch.allclose(net.logits(one, x[0]), net.logits(other, x[0]))
    patches = vmap(net.patch_features)(both, x)
    torch.testing.assert_close(patches[1], net.patch_features(other, x[1]), rtol=0, atol=2e-6)


def test_a_small_share_of_what_is_new_leaves_the_base_as_it_is() -> None:
    net, x = clip_network(FIXED, adapter={**RESIDUAL, "ratio": 1e-7}), inputs("vit", 5, 0)
    wanted = logits_of(lambda f: f, x.double()).float()
    torch.testing.assert_close(net.logits(net.initialize(0), x), wanted, rtol=0, atol=1e-4)


def test_what_is_trained_begins_as_linear_layers_do_and_is_one_group() -> None:
    net = clip_network({"context": "none"}, adapter=ATTENTION)
    tree = net.initialize(4)
    names = [f"model.feature_adapter.{layer}.{key}" for layer in ("first", "second") for key in ("weight", "bias")]
    assert list(tree) == names and net.groups["adapters"] == net.groups["features"] == tuple(names)
    assert not net.groups["head"] and not net.groups["context"]
    for layer in ("first", "second"):
        weight = tree[f"model.feature_adapter.{layer}.weight"]
        assert weight.shape == (WIDTH, WIDTH) and 0.9 < float(weight.abs().max()) * WIDTH**0.5 <= 1
        assert not tree[f"model.feature_adapter.{layer}.bias"].any()
    assert not torch.equal(net.initialize(5)[names[0]], tree[names[0]])
    assert clip_network({"context": "none"}, adapter="features").initialize(4).keys() == tree.keys()
    shapes = [tuple(leaf.shape) for leaf in clip_network({"context": "none"}, adapter=RESIDUAL).initialize(0).values()]
    assert shapes == [(WIDTH // 3, WIDTH), (WIDTH, WIDTH // 3)]


def experiment(folder: Path, name: str, method: Any, adapter: Any = "features", **prompt: Any) -> Any:
    model = {"folder": str(clip_base()), "head": NO_HEAD, "adapter": adapter, "prompt": {**PROMPT, **prompt}}
    return over_vit(folder, name, method, model=model)


def test_a_trained_adapter_leaves_as_a_file_of_tensors_alone(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "ditto", context="none"))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    export_model(models, 1, None, tmp_path / "own.safetensors")
    own = load_file(tmp_path / "own.safetensors")
    assert own.keys() == {*models.parts.task.network.initialize(0), "model.texts.weight"}
    with pytest.raises(ConfigError, match="--format peft: peft has no adapters of features: leave --format out"):
        export_adapter(models, 1, None, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="--format transformers: 'personalized' passes features through a network"):
        export_merged(models, 1, None, tmp_path / "merged")


@pytest.mark.parametrize("method", ["feddpa", "fedalt", "hetlora", "flora", {"name": "fedper", "head_group": "lora_b"}])
def test_methods_of_factors_refuse_it_before_the_run(method: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs model\.adapter\.name=lora.*those of features have none"):
        rayfl.run(experiment(tmp_path, "run", method, context="none"))


def test_a_cut_in_two_needs_a_context_beside_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head_group is last_layer, of which this model trains nothing"):
        rayfl.run(experiment(tmp_path, "alone", "fedper", context="none"))
    rayfl.run(experiment(tmp_path, "both", "fedper", length=2))


def test_models_with_it_are_not_laid_side_by_side() -> None:
    net = clip_network({"context": "none"}, adapter=ATTENTION)
    with pytest.raises(ModelError, match=r"set model\.adapter\.name=lora"):
        side_by_side([trained(net, 0), trained(net, 1)], torch.tensor([[0.5, 0.5]]))


def test_other_bases_and_what_leaves_nothing_are_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.adapter\.name=features is for CLIP.*not for vit: choose lora or ia3"):
        network("vit", adapter=ATTENTION)
    with pytest.raises(ModelError, match=r"reduction is 33, and the base has 32 features: set it to at most 32"):
        clip_network({"context": "none"}, adapter={**RESIDUAL, "reduction": 33})
    narrow = clip_network({"context": "none"}, adapter={**RESIDUAL, "reduction": 32}).initialize(0)
    assert [tuple(leaf.shape) for leaf in narrow.values()] == [(1, 32), (32, 1)]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("{name: features, reduction: 2}", "reduction is of form=residual: set that, or leave reduction out"),
        ("{name: features, form: attention, ratio: 0.2}", "ratio is of form=residual"),
        ("{name: features, form: residual, ratio: 0}", r"model\.adapter\.ratio"),
        ("{name: features, start: folder}", r"model\.adapter\.start: unknown"),
    ],
)
def test_options_without_effect_are_refused_by_name(adapter: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, experiment(tmp_path, "run", "fedavg"), [f"model.adapter={adapter}"])
