"""Commands, exports and presets of adapters, and what methods refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import safetensors
import safetensors.torch
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import preset_names
from rayfl.errors import ConfigError, ModelError, RayflError
from rayfl.models.pretrained import making
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.peft_files import SETTINGS, WEIGHTS, write_adapter
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter
from rayfl.runs.folder import open_run
from tests.support.adapter_runs import ADAPTERS, experiment
from tests.support.bases import (
    CAUSAL,
    CONFIGS,
    IMAGES,
    base,
    inputs,
    language_network,
    language_section,
    network,
    section,
    texts,
    trained,
)
from tests.support.experiments import EVERY, SECTIONS, TRAIN, assert_same, outcome
from tests.support.toys import assert_close


def test_the_command_line_makes_describes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "TRAINING_STEPS", 2)
    command = CliRunner()
    made = command.invoke(app, ["model", "make", "tiny-vit", "--out", str(tmp_path / "vit")])
    assert made.exit_code == 0 and BaseFolder(tmp_path / "vit").sha256 in made.output
    seen = command.invoke(app, ["model", "inspect", str(tmp_path / "vit")])
    assert "q_proj, v_proj" in seen.output and BaseFolder(tmp_path / "vit").sha256 in seen.output
    rayfl.run(experiment(tmp_path, "run", "fedper"))
    found = command.invoke(
        app, ["export", str(tmp_path / "run"), "--client", "1", "--format", "peft", "--out", str(tmp_path / "adapter")]
    )
    assert found.exit_code == 0, found.output
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert settings["modules_to_save"] == ["classifier"] and len(settings["target_modules"]) == 4
    with safetensors.safe_open(tmp_path / "adapter" / WEIGHTS, framework="pt") as file:
        about = json.loads(file.metadata()["rayfl"])
        assert about["base"] == BaseFolder(base("vit")).sha256 and about["client"] == 1
        assert all(name.startswith("base_model.model.") for name in file.keys())  # noqa: SIM118 -- a file of safetensors is no mapping


@pytest.mark.slow
def test_two_adapters_leave_as_one_of_twice_the_rank_or_not_at_all(tmp_path: Path) -> None:
    command, folder = CliRunner(), tmp_path / "even"
    rayfl.run(experiment(tmp_path, "dpa", "feddpa"))
    words = ["export", str(tmp_path / "dpa"), "--client", "1", "--format", "peft", "--out", str(folder)]
    found = command.invoke(app, [*words, "--model", "even"])
    assert found.exit_code == 0, found.output
    settings = json.loads((folder / SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2 * ADAPTERS["r"], 2 * ADAPTERS["alpha"])
    plain = section("vit", adapter={"r": 4, "alpha": 8, "start": str(folder)}).network(IMAGES)
    models = CommittedModels(open_run(str(tmp_path / "dpa"), Experiment))
    even, x = models.predictor(1, "even"), inputs("vit", 5, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(even.built()[0], x)
        torch.testing.assert_close(plain.logits(plain.initialize(0), x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="it is no single model"):
        export_adapter(models, 1, "instance", tmp_path / "mixed")
    rayfl.run(experiment(tmp_path, "alt", "fedalt"))
    models = CommittedModels(open_run(str(tmp_path / "alt"), Experiment))
    with pytest.raises(ConfigError, match="'personalized' mixes two adapters by the rows of an input"):
        export_adapter(models, 1, None, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


@pytest.mark.parametrize(
    ("method", "row", "times"),
    [
        pytest.param(
            {"name": "superfed", "start": 0.0, "adapters": "products"}, "lambda=0.3", 2, marks=pytest.mark.slow
        ),
        ({"name": "floco", "simplex_dimension": 2, "assignment_round": 1, "simplex_over": "adapters"}, None, 3),
    ],
    ids=["SuPerFed", "FLOCO"],
)
def test_points_of_products_leave_as_adapters_of_a_higher_rank(
    method: Any, row: str | None, times: int, tmp_path: Path
) -> None:
    rayfl.run(experiment(tmp_path, "run", method))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    done = export_adapter(models, 1, row, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (times * ADAPTERS["r"], times * ADAPTERS["alpha"])
    adapter = {"r": times * ADAPTERS["r"], "alpha": times * ADAPTERS["alpha"], "start": str(tmp_path / "out")}
    plain, x = section("vit", adapter=adapter).network(IMAGES), inputs("vit", 5, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(models.predictor(1, done.row).built()[0], x)
        torch.testing.assert_close(plain.logits(plain.initialize(0), x), expected, rtol=1e-5, atol=1e-5)


def test_methods_refuse_what_they_cannot(tmp_path: Path) -> None:
    for method, message in (
        ("fedbn", "no normalization layer"),
        ({"name": "per_fedavg", "version": "exact"}, r"fused attention has none: set model\.attention=eager"),
        ("scaffold", r"train\.optimizer=sgd"),
        ({"name": "pfedme", "proximal_weight": 1.0}, r"train\.optimizer=sgd"),
    ):
        with pytest.raises(RayflError, match=message):
            rayfl.run(experiment(tmp_path, "run", method))
    fixed = {"head": {"train": False, "init": "folder"}}
    with pytest.raises(ModelError, match=r"model\.head: .* needed is \(10, 32\)"):
        rayfl.run(experiment(tmp_path, "run", "floco", model=fixed))
    plain = experiment(tmp_path, "run", {"name": "fedper", "head_group": "lora_b"})
    with pytest.raises(ConfigError, match="head_group is lora_b, but this model has no adapters: set model=pretrained"):
        rayfl.run({**plain, "model": {"name": "two_nn", "hidden": [4]}})
    frozen = {"adapter": {**ADAPTERS, "trains": ["b"]}}
    half = experiment(tmp_path, "run", {"name": "fedper", "head_group": "lora_a"}, model=frozen)
    with pytest.raises(ConfigError, match="of which this model trains nothing"):
        rayfl.run(half)


def test_the_preset_says_how_its_base_is_made(tmp_path: Path) -> None:
    assert "quickstart-lora" in preset_names()
    with pytest.raises(ModelError, match="rayfl model make tiny-vit --out"):
        rayfl.run("quickstart-lora", model__folder=str(tmp_path / "none"), storage_path=str(tmp_path))
    assert not list(tmp_path.glob("*/commits"))


ALONE = """
import json, sys
import torch, transformers, peft
from safetensors.torch import load_file
folder, base, kind, classes = sys.argv[1:5]
options = {"num_labels": int(classes), "ignore_mismatched_sizes": True} if int(classes) else {}
bare = getattr(transformers, kind).from_pretrained(base, local_files_only=True, **options)
model = peft.PeftModel.from_pretrained(bare, folder).eval()
given = load_file(folder + "/given.safetensors")
expected = given.pop("logits")
with torch.no_grad():
    found = model(**given).logits
    whole = model.merge_and_unload()(**given).logits
assert not any(name.partition(".")[0] == "rayfl" for name in sys.modules)
print(json.dumps([float((one - expected).abs().max()) for one in (found, whole)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "llama, causal"])
def test_a_process_without_rayfl_computes_the_same(family: str, tmp_path: Path) -> None:
    """With peft's model, and with the adapter merged into the base."""
    pytest.importorskip("peft", reason="peft is not installed")
    name, causal = family.partition(",")[0], "causal" in family
    made = language_section(name) if causal else section(name)
    net = language_network(name) if causal else network(name)
    tree, x = trained(net, 0), texts(4, 0)[0] if causal else inputs(name, 4, 0)
    folder = tmp_path / "adapter"
    write_adapter(folder, tree, made.peft_settings(list(tree), "tokens" if causal else "class"), {})
    given = {"pixel_values" if name == "vit" else "input_ids": x.contiguous(), "logits": net.logits(tree, x).detach()}
    safetensors.torch.save_file(given, folder / "given.safetensors")
    kind = CAUSAL[name] if causal else CONFIGS[name][1]
    words = [str(folder), str(base(name, causal)), kind, str(0 if causal else net.head_shape[0])]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    adapted, merged = json.loads(done.stdout.splitlines()[-1])
    assert adapted <= 1e-6 and merged <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_is_one_run_however_it_is_computed(tmp_path: Path) -> None:
    """Client by client and stacked, in this process and on two actors, by the preset's own settings."""
    made = making.make("tiny-vit", tmp_path / "tiny-vit")
    short = {"train.rounds": 2, "evaluation.every": 1, "tracking.tensorboard": False, "storage_path": str(tmp_path)}
    ways = {
        "one": {"engine.mode": "looped", "cluster.backend": "inline"},
        "stacked": {"engine.mode": "vectorized", "cluster.backend": "inline"},
        "actors": {"engine.mode": "looped", "cluster.num_actors": 2},
    }
    for name, way in ways.items():
        rayfl.run("quickstart-lora", **{"model.folder": str(made.folder), "name": name, **short, **way})
    found = {name: outcome(tmp_path / name) for name in ways}
    assert_same(found["one"], found["actors"])
    assert_close(found["one"].server, found["stacked"].server, 1e-4)
    for column in ("top1", "loss", "bytes_up", "bytes_down"):
        one, other = (found[name].clients[column].to_pylist() for name in ("one", "stacked"))
        assert len(one) == len(other) and one.count(None) == other.count(None)
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None]
        assert pairs and all(a == pytest.approx(b, abs=1e-4) for a, b in pairs), column


UNFIT = {
    "fedap",
    "fedbn",
    "depthfl",
    "inclusivefl",
    "scalefl",
    "fedmlb",
    "heterofl",
    "fedrolex",
    "fjord",
    "fedpgp",
    "fedotp",
    "fedtpg",
    "pfedmoap",
    "pfedpara",
}
UNFIT |= {"fairfed", "fedfb"}
"""Methods that refuse these models, or data: they need normalization, layers that can be cut, CLIP, factors,
or groups of people."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name not in UNFIT])
def test_every_method_trains_over_adapters(name: str, tmp_path: Path) -> None:
    train = {"optimizer": "sgd", "momentum": 0.5, **TRAIN.get(name, {})}
    more = {key: value for key, value in SECTIONS.get(name, {}).items() if key != "model"}
    rayfl.run(experiment(tmp_path, "run", EVERY[name], train=train, **more))
    assert pq.read_table(tmp_path / "run" / "rounds.parquet").num_rows > 0
