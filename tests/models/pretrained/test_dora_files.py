"""Adapters with magnitudes (DoRA) in runs, as files of peft, as weights of the base, and what refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained.magnitudes import MAGNITUDE
from rayfl.models.pretrained.merging import merge
from rayfl.models.pretrained.peft_files import AdapterFolder, write_adapter
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter, export_merged
from rayfl.runs.folder import open_run
from tests.support.adapter_runs import ADAPTERS, experiment
from tests.support.bases import CONFIGS, IMAGES, TOKENS, base, inputs, network, section, trained, transformers
from tests.support.experiments import outcome
from tests.support.toys import assert_equal

DORA = {"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r", "use_dora": True}
FAMILIES = ["vit", "llama", "gpt2", "bert", "roberta"]
SMALL = {**ADAPTERS, "use_dora": True}


def bare(family: str, classes: int) -> Any:
    """transformers' model without adapters."""
    _, name, _ = CONFIGS[family]
    return getattr(transformers, name).from_pretrained(
        base(family), num_labels=classes, ignore_mismatched_sizes=True, local_files_only=True
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.two_cases
def test_peft_reads_what_is_written_and_a_run_begins_from_what_peft_writes(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net, made = network(family, adapter=DORA), section(family, adapter=DORA)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree)), {})
    model = peft.PeftModel.from_pretrained(bare(family, net.head_shape[0]), tmp_path / "adapter").eval()
    with torch.no_grad():
        found = model(pixel_values=x) if family == "vit" else model(input_ids=x)
    torch.testing.assert_close(found.logits, net.logits(tree, x), rtol=2e-6, atol=2e-6)
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    begun = section(family, adapter={**DORA, "start": str(tmp_path / "again")})
    assert_equal(begun.network(IMAGES if family == "vit" else TOKENS).initialize(11), tree)


def test_magnitudes_and_gradients_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = network("vit", adapter=DORA)
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, use_rslora=True, use_dora=True, target_modules=["q_proj", "v_proj"],
        modules_to_save=["classifier"],
    )  # fmt: skip
    theirs = peft.get_peft_model(bare("vit", net.head_shape[0]), settings).eval()
    start = net.initialize(0)
    names = {
        f"{site}.{end}": f"base_model.{site}.{end.replace('.weight', '')}.default.weight"
        for site in net.sites
        for end in ("lora_A.weight", "lora_B.weight", MAGNITUDE[1:])
    }
    parameters = dict(theirs.named_parameters())
    for name in net.groups["magnitudes"]:
        torch.testing.assert_close(parameters[names[name]].detach(), start[name], rtol=1e-6, atol=1e-7)
    tree = trained(net, 5)
    write_adapter(tmp_path, tree, section("vit", adapter=DORA).peft_settings(list(tree)), {})
    theirs = peft.PeftModel.from_pretrained(bare("vit", net.head_shape[0]), tmp_path, is_trainable=True).eval()
    parameters, x, y = dict(theirs.named_parameters()), inputs("vit", 6, 0), torch.arange(6)
    F.cross_entropy(theirs(pixel_values=x).logits, y).backward()
    own = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
    F.cross_entropy(net.logits(own, x, training=True), y).backward()
    for name in names:
        expected, found = parameters[names[name]].grad, own[name].grad
        assert expected is not None and found is not None
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.two_cases
def test_merged_weights_have_the_same_outputs(family: str) -> None:
    net = network(family, adapter={**DORA, "targets": "all-linear"})
    tree, x = trained(net, 0), inputs(family, 4, 0)
    with torch.no_grad():
        model, expected = merge(net, tree).eval(), net.logits(tree, x)
        found = (model(pixel_values=x) if family == "vit" else model(input_ids=x)).logits
    assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_a_run_sends_and_keeps_them_and_leaves_as_both_kinds_of_files(tmp_path: Path) -> None:
    method = {"name": "fedper", "head_group": "lora_b_and_head"}
    rayfl.run(experiment(tmp_path, "run", method, model={"adapter": SMALL}))
    done = outcome(tmp_path / "run")
    for state in done.states.values():
        own = {name for name in state["personal"] if name.endswith(MAGNITUDE)}
        assert len(own) == 4
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    predictor, x = models.predictor(1, "personalized"), inputs("vit", 5, 0)
    tree = predictor.built()[0]
    start = models.parts.task.network.initialize(0)
    assert any(not torch.equal(tree[name], start[name]) for name in tree if name.endswith(MAGNITUDE))
    export_adapter(models, 1, None, tmp_path / "adapter")
    export_merged(models, 1, None, tmp_path / "merged")
    again = network("vit", adapter={**SMALL, "start": str(tmp_path / "adapter")})
    whole = transformers.ViTForImageClassification.from_pretrained(tmp_path / "merged", local_files_only=True).eval()
    with torch.no_grad():
        expected = models.parts.task.network.logits(tree, x)
        torch.testing.assert_close(again.logits(again.initialize(0), x), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(whole(pixel_values=x).logits, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("feddpa", "FedDPA needs .*: a layer has two adapters"),
        ("fedalt", "FedALT needs .*: a layer has two adapters"),
        ("hetlora", "hetlora needs .*: adapters are cut and combined by their products"),
        ("flora", "flora needs .*: adapters are cut and combined by their products"),
        ("flexlora", "flexlora needs .*: adapters are cut and combined by their products"),
        ({"name": "superfed", "adapters": "products"}, "algorithm.adapters=products needs .*: a layer with magnitudes"),
        (
            {"name": "floco", "simplex_dimension": 2, "simplex_over": "adapters"},
            "algorithm.simplex_over=adapters needs .*: a layer with magnitudes",
        ),
    ],
)
def test_methods_of_products_refuse_them_before_the_run(method: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        rayfl.run(experiment(tmp_path, "run", method, model={"adapter": SMALL}))
    assert "needs model.adapter.use_dora=false" in str(refused.value)


def test_an_adapter_to_begin_from_must_be_of_the_same_kind(tmp_path: Path) -> None:
    for name, dora in (("plain", False), ("dora", True)):
        net, adapter = network("vit", adapter={**DORA, "use_dora": dora}), {**DORA, "use_dora": dora}
        tree = trained(net, 0)
        write_adapter(tmp_path / name, tree, section("vit", adapter=adapter).peft_settings(list(tree)), {})
        assert AdapterFolder(str(tmp_path / name)).settings["use_dora"] is dora
        other = {**adapter, "use_dora": not dora, "start": str(tmp_path / name)}
        with pytest.raises(ModelError, match=rf"needs .* model\.adapter\.use_dora={str(dora).lower()}$"):
            section("vit", adapter=other).network(IMAGES)


def test_only_runs_with_magnitudes_are_identified_by_them(tmp_path: Path) -> None:
    prints = [
        load_config(Experiment, experiment(tmp_path, "run", "fedavg", model={"adapter": adapter}), {}).fingerprint()
        for adapter in (ADAPTERS, {**ADAPTERS, "use_dora": False}, SMALL)
    ]
    assert prints[0] == prints[1] != prints[2]
