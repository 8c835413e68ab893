"""Adapters that are merged into the base: plain models of transformers, with the same outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.merging import ABOUT, merge, write_model
from rayfl.models.pretrained.mixing import blended
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.peft_files import write_adapter
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_merged
from rayfl.runs.folder import open_run
from tests.support.adapter_runs import experiment
from tests.support.bases import (
    IMAGES,
    base,
    inputs,
    language_network,
    network,
    section,
    texts,
    trained,
    transformers,
    write_base,
)
from tests.support.experiments import small_experiment
from tests.support.toys import assert_equal

ADAPTER = {"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r"}


def loaded(folder: Path, kind: str) -> Any:
    """The model in a folder, of which every weight is there and none is too many."""
    model, report = getattr(transformers, kind).from_pretrained(
        folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_same_outputs(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to float32's rounding of weights that are added up, which passes through all layers."""
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.two_cases
@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "bert", "roberta"])
def test_a_classifier_with_merged_adapters_has_the_same_outputs(family: str, targets: Any, tmp_path: Path) -> None:
    net = network(family, adapter={**ADAPTER, "targets": targets})
    tree, x = trained(net, 0), inputs(family, 4, 0)
    before = BaseFolder(base(family)).digest()
    with torch.no_grad():
        expected = net.logits(tree, x)
    write_model(tmp_path / "whole", net, tree, {"client": 3})
    kind = "AutoModelForImageClassification" if family == "vit" else "AutoModelForSequenceClassification"
    with torch.no_grad():
        model = loaded(tmp_path / "whole", kind)
        found = (model(pixel_values=x) if family == "vit" else model(input_ids=x)).logits
        assert_same_outputs(found, expected)
        # The base that networks share has no adapters now, neither in its files.
        assert_equal(net.logits(tree, x), expected)
    assert BaseFolder(base(family)).digest() == before
    assert json.loads((tmp_path / "whole" / ABOUT).read_text()) == {"client": 3}
    assert model.config.num_labels == expected.shape[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_language_model_with_merged_adapters_has_the_same_outputs(family: str, tmp_path: Path) -> None:
    net = language_network(family, adapter={**ADAPTER, "trains": ["b"]})
    whole = {**trained(net, 0), **net.fixed_parameters}
    x, _ = texts(4, 0, shortest=12)
    write_model(tmp_path / "whole", net, whole, {})
    with torch.no_grad():
        expected = net.logits({name: whole[name] for name in net.parameter_names}, x)
        model = loaded(tmp_path / "whole", "AutoModelForCausalLM")
        assert_same_outputs(model(input_ids=x).logits, expected)
    assert model.config.use_cache  # to generate with
    with pytest.raises(ConfigError, match="has a model: name another folder"):
        write_model(tmp_path / "whole", net, whole, {})


def test_a_model_and_an_adapter_are_not_written_to_one_folder(tmp_path: Path) -> None:
    """There from_pretrained would add the adapter to weights that have it already."""
    net = network("vit")
    tree = net.initialize(0)
    settings = section("vit").peft_settings(list(tree))
    write_model(tmp_path / "model", net, tree, {})
    with pytest.raises(ConfigError, match="has a model: name another folder"):
        write_adapter(tmp_path / "model", tree, settings, {})
    write_adapter(tmp_path / "adapter", tree, settings, {})
    with pytest.raises(ConfigError, match="has an adapter: name another folder"):
        write_model(tmp_path / "adapter", net, tree, {})


def test_other_weights_in_the_folder_are_named(tmp_path: Path) -> None:
    """from_pretrained would read them in place of those that are written."""
    net = network("vit")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"has other weights \(model-00001-of-00002\.safetensors\)"):
        write_model(tmp_path, net, net.initialize(0), {})
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_an_interrupted_export_leaves_neither_a_model_nor_an_adapter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("vit")
    tree = net.initialize(0)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "own.txt").touch()

    def write(folder: Path) -> None:
        if kind == "model":
            write_model(folder, net, tree, {})
        else:
            write_adapter(folder, tree, section("vit").peft_settings(list(tree)), {})

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", Mock(side_effect=KeyboardInterrupt))  # the weights are written by then
        for name in ("new", "there"):
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "own.txt"]
    write(tmp_path / "there")
    assert not list(tmp_path.glob("there/.partial*")) and (tmp_path / "there" / "own.txt").exists()


def test_a_full_disk_is_told_as_what_the_user_can_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("vit")
    full = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", Mock(side_effect=full))
    with pytest.raises(ConfigError, match=r"whole cannot be written: .* No space left"):
        write_model(tmp_path / "whole", net, net.initialize(0), {})
    assert not list(tmp_path.iterdir())


def test_adapters_of_a_higher_rank_are_merged_at_the_scale_of_the_network() -> None:
    net = network("vit", adapter={"r": 3, "alpha": 6})
    one, other = trained(net, 0), trained(net, 1)
    both = blended([one, other], dict.fromkeys(one, (0.25, 0.75)))
    made, x = merge(net, both), inputs("vit", 4, 0)
    with torch.no_grad():
        assert_same_outputs(made.eval()(pixel_values=x).logits, net.logits(both, x))


def test_shards_and_reduced_precision_of_the_base_are_merged_in_float32(tmp_path: Path) -> None:
    folder = write_base("vit", tmp_path / "base", shard="20KB")
    assert len(BaseFolder(folder).files) > 1
    net = network("vit", folder=str(folder))
    assert isinstance(net, AdaptedNetwork)
    net.compute_in(torch.bfloat16)
    tree, x = trained(net, 0), inputs("vit", 4, 0)
    made = merge(net, tree)
    assert {leaf.dtype for leaf in made.state_dict().values()} == {torch.float32}
    net.compute_in(torch.float32)
    with torch.no_grad():
        assert_same_outputs(made.eval()(pixel_values=x).logits, net.logits(tree, x))


def test_the_command_line_writes_what_from_pretrained_loads(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "fedper"))
    words = ["export", str(tmp_path / "run"), "--client", "1", "--format", "transformers", "--out"]
    found = CliRunner().invoke(app, [*words, str(tmp_path / "whole")])
    assert found.exit_code == 0, found.output
    whole = loaded(tmp_path / "whole", "AutoModelForImageClassification")
    size = sum(parameter.numel() for parameter in whole.parameters())
    assert f": {size:,} numbers -> " in found.output and "lora_A" not in found.output
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    predictor, x = models.predictor(1, "personalized"), inputs("vit", 4, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(predictor.built()[0], x)
        assert_same_outputs(
            loaded(tmp_path / "whole", "AutoModelForImageClassification")(pixel_values=x).logits, expected
        )
    about = json.loads((tmp_path / "whole" / ABOUT).read_text())
    assert about["client"] == 1 and about["base"] == BaseFolder(base("vit")).sha256
    assert isinstance(CliRunner().invoke(app, [*words, str(tmp_path / "whole")]).exception, ConfigError)
    # What was written is a base itself.
    again = network("vit", folder=str(tmp_path / "whole"), head={"init": "folder"})
    start = again.initialize(0)
    with torch.no_grad():
        assert_same_outputs(again.logits(start, x), expected)
    assert tuple(again.head_shape) == (IMAGES.num_classes, 32)


def exported(folder: Path, name: str, **sections: Any) -> Any:
    """The configuration of what a run of one round exports, as transformers reads it."""
    rayfl.run(experiment(folder, name, "fedavg", train={"rounds": 1}, **sections))
    models = CommittedModels(open_run(str(folder / name), Experiment))
    export_merged(models, 1, None, folder / f"{name}-out")
    return loaded(folder / f"{name}-out", "AutoModelForImageClassification").config


@pytest.mark.slow
def test_the_names_of_the_outputs_are_those_of_the_datas_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    folder = write_base("vit", tmp_path / "base", outputs=10)
    file = folder / "config.json"
    theirs = [f"animal {number}" for number in range(10)]
    names = {"id2label": dict(enumerate(theirs)), "label2id": {name: number for number, name in enumerate(theirs)}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    # As many classes as the base has: a new head knows none of its names, its own all of them.
    model = {"folder": str(folder)}
    found = exported(tmp_path, "new", model=model)
    assert found.num_labels == 10 and found.id2label == {number: f"LABEL_{number}" for number in range(10)}
    assert found.label2id == {label: number for number, label in found.id2label.items()}
    assert exported(tmp_path, "own", model={**model, "head": {"init": "folder"}}).id2label == names["id2label"]
    rows = {"image": [[0.1 * row] * 64 for row in range(40)], "y": ["no", "yes"] * 20}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    data = {"name": "parquet", "path": str(tmp_path / "rows.parquet"), "shape": [1, 8, 8], "labels": "renumbered"}
    found = exported(tmp_path, "texts", model=model, dataset=data, partition={"name": "iid", "num_clients": 5})
    assert found.num_labels == 2 and found.id2label == {0: "no", 1: "yes"} and found.label2id == {"no": 0, "yes": 1}


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "dpa", "feddpa"))
    models = CommittedModels(open_run(str(tmp_path / "dpa"), Experiment))
    with pytest.raises(ConfigError, match="it is no single model"):
        export_merged(models, 1, "instance", tmp_path / "mixed")
    export_merged(models, 1, "even", tmp_path / "even")  # fixed shares are one adapter
    predictor, x = models.predictor(1, "even"), inputs("vit", 4, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(predictor.built()[0], x)
        assert_same_outputs(
            loaded(tmp_path / "even", "AutoModelForImageClassification")(pixel_values=x).logits, expected
        )
    rayfl.run(experiment(tmp_path, "alt", "fedalt"))
    models = CommittedModels(open_run(str(tmp_path / "alt"), Experiment))
    with pytest.raises(ConfigError, match="--format transformers: 'personalized' mixes two adapters by the rows"):
        export_merged(models, 1, None, tmp_path / "mixed")
    rayfl.run(small_experiment(tmp_path, "plain", "fedavg", backend="inline"))
    models = CommittedModels(open_run(str(tmp_path / "plain"), Experiment))
    with pytest.raises(ConfigError, match=r"--format transformers: model=.* has no adapters"):
        export_merged(models, 1, None, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
