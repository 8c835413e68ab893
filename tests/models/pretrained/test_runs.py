"""Whole runs over a pretrained base: what travels, what identifies them, and what leaves as files of peft."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
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
from rayfl.config.loading import load_config, preset_names
from rayfl.errors import ConfigError, ModelError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.models.pretrained import making
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.peft_files import SETTINGS, WEIGHTS, write_adapter
from rayfl.params import leaves
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.bases import (
    CAUSAL,
    CONFIGS,
    IMAGES,
    TOKENS,
    base,
    inputs,
    language_network,
    language_section,
    network,
    section,
    texts,
    trained,
    transformers,
)
from tests.support.experiments import EVERY, SECTIONS, TRAIN, assert_same, outcome
from tests.support.toys import assert_close, assert_equal

ADAPTERS = {"r": 2, "alpha": 4}
A, B, HEAD = 4 * 2 * 32, 4 * 32 * 2, 32 * 10 + 10
"""Scalars of all first and second factors, and of the head, of the small vision transformer."""


def experiment(folder: Path, name: str, method: Any, **sections: Any) -> dict[str, Any]:
    """Five clients of scikit-learn's digits, two rounds of three, in this process."""
    return {
        "name": name,
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
        "model": {"name": "pretrained", "folder": str(base("vit")), "adapter": ADAPTERS, **sections.pop("model", {})},
        "algorithm": method,
        "train": {
            "rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 64, "lr": 0.01, "optimizer": "adamw",
            **sections.pop("train", {}),
        },
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **sections,
    }  # fmt: skip


SENT = {
    "FedIT": ({"name": "fedavg"}, {}, A + B + HEAD),
    "FFA-LoRA": ({"name": "fedavg"}, {"adapter": {**ADAPTERS, "trains": ["b"]}}, B + HEAD),
    "FedSA-LoRA": ({"name": "fedper", "head_group": "lora_b_and_head"}, {}, A),
    "FedPer": ({"name": "fedper"}, {}, A + B),
    "LG-FedAvg of B": ({"name": "lg_fedavg", "head_group": "lora_b"}, {}, B),
    "Ditto": ({"name": "ditto"}, {}, A + B + HEAD),
    "FedDPA": ({"name": "feddpa", "local_epochs": 1}, {}, A + B + HEAD),
    "FedALT": ({"name": "fedalt"}, {}, A + B),
}


@pytest.mark.parametrize("name", SENT)
def test_messages_are_what_is_shared_and_stacks_are_looped_clients(name: str, tmp_path: Path) -> None:
    method, model, scalars = SENT[name]
    for mode in ("looped", "vectorized"):
        rayfl.run(experiment(tmp_path, mode, method, model=model, engine={"mode": mode}))
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 2e-4)
    assert one.states.keys() == other.states.keys()
    for client in one.states:
        assert_close(one.states[client], other.states[client], 2e-4)
    sent = [row for row in one.clients.to_pylist() if row["bytes_down"] is not None and row["cohort"] == "selected"]
    assert sent and {row["bytes_up"] for row in sent} == {4 * scalars} == {row["bytes_down"] for row in sent}
    names = {path.rpartition("/")[2] for path, _ in leaves(one.server)}
    assert all(".lora_" in leaf or ".classifier." in leaf for leaf in names)


def test_inv_fedsa_keeps_each_b_with_its_client(tmp_path: Path) -> None:
    """A client that is not sampled keeps its bits, one that never was has B = 0, and B is in no message."""
    method = SENT["FedSA-LoRA"][0]
    rayfl.run(
        experiment(tmp_path, "run", method, train={"clients_per_round": 2, "rounds": 3}, storage={"keep_commits": 9})
    )
    store = CommitStore(Storage(str(tmp_path / "run")))
    commits = [store.read_manifest(name) for name in store.manifests()]
    assert len(commits) >= 3
    states = [{k: store.read_states(file)[k] for k, file in commit.states.items()} for commit in commits]
    moved = kept = 0
    for before, after in pairwise(states):
        for client, state in before.items():
            same = all(torch.equal(leaf, dict(leaves(after[client]))[path]) for path, leaf in leaves(state))
            moved, kept = moved + (not same), kept + same
    final = states[-1]
    assert len(final) >= 2 and kept > 0
    personal = [state["personal"] for state in final.values()]
    assert all(".lora_A." not in name for own in personal for name in own)
    first, second = personal[:2]
    assert any(not torch.equal(first[name], second[name]) for name in first if ".lora_B." in name)
    shared = store.read_server(commits[-1])["shared"]
    assert all(".lora_A." in name for name in shared)


@pytest.mark.parametrize(("name", "own"), [("Ditto", A + B + HEAD), ("FedSA-LoRA", B + HEAD), ("FedPer", HEAD)])
def test_a_commit_has_what_is_personal_and_no_more(name: str, own: int, tmp_path: Path) -> None:
    """Clients x 4 bytes x scalars, and headers: the base is in no commit."""
    rayfl.run(experiment(tmp_path, "run", SENT[name][0], train={"clients_per_round": "all"}))
    store = CommitStore(Storage(str(tmp_path / "run")))
    commit = store.read_manifest(store.manifests()[-1])
    files = set(commit.states.values())
    assert len(commit.states) == 5
    tensors = 5 * 4 * own
    assert tensors < sum(len(store.read(file)) for file in files) < tensors + 5 * len(commit.states) * 1000
    assert len(store.read(commit.server)) < 4 * (A + B + HEAD) + 4000


def test_inv_ffa_averages_without_product_error() -> None:
    """mean(B) A = mean(B A) where A is one, and not where each client has its own (FedIT)."""

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        exact = torch.einsum("nor,nri->oi", b, a) / len(a)
        return float((b.mean(0) @ a.mean(0) - exact).norm() / exact.norm())

    generator = torch.Generator().manual_seed(0)
    b, a = torch.randn(4, 32, 2, generator=generator), torch.randn(4, 2, 32, generator=generator)
    assert error(a[:1].expand(4, -1, -1), b) < 1e-6 < 0.1 < error(a, b)
    net = network("vit", adapter={**ADAPTERS, "trains": ["b"]})
    other = network("vit", adapter={**ADAPTERS, "trains": ["b"]})
    net.settle(5), other.settle(5)
    assert_equal(net.fixed_parameters, other.fixed_parameters)
    assert not any(".lora_A." in name for name in net.parameter_names)


def test_inv_one_round_of_one_step_leaves_a(tmp_path: Path) -> None:
    """B = 0 gives dA = 0."""
    plain = {"rounds": 1, "min_local_steps": 0, "batch_size": None, "optimizer": "sgd"}
    rayfl.run(experiment(tmp_path, "run", {"name": "fedavg"}, train=plain))
    net = network("vit", adapter=ADAPTERS)
    config = load_config(Experiment, experiment(tmp_path, "run", {"name": "fedavg"}, train=plain), {})
    initial = Parts(config).initial_server()["model"]
    model = outcome(tmp_path / "run").server["model"]
    for name in net.parameter_names:
        assert torch.equal(model[name], initial[name]) == (".lora_A." in name), name


def test_the_base_identifies_a_run_and_its_place_does_not(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base("vit"), moved)
    here = load_config(Experiment, experiment(tmp_path, "run", "fedavg"), {})
    there = load_config(Experiment, experiment(tmp_path, "run", "fedavg"), {"model.folder": str(moved)})
    assert here.model.base == there.model.base == BaseFolder(moved).sha256
    assert here.fingerprint() == there.fingerprint()
    content = bytearray((moved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (moved / "model.safetensors").write_bytes(bytes(content))
    changed = load_config(Experiment, experiment(tmp_path, "run", "fedavg"), {"model.folder": str(moved)})
    assert changed.fingerprint() != here.fingerprint()


def test_a_run_is_not_verified_or_continued_with_other_weights(tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(base("vit"), moved)
    rayfl.run(experiment(tmp_path, "run", "fedavg", model={"folder": str(moved)}))
    folder = tmp_path / "run"
    assert not verify(Storage(str(folder))).problems
    content = bytearray((moved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (moved / "model.safetensors").write_bytes(bytes(content))
    (problem,) = verify(Storage(str(folder))).problems
    assert BaseFolder(moved).digest() in problem and "model.base in config.yaml" in problem
    with pytest.raises(ModelError, match=r"but model\.base is"):
        rayfl.run(str(folder), train__rounds=3)
    shutil.rmtree(moved)
    report = verify(Storage(str(folder)))
    assert not report.problems and any("was not looked at" in note for note in report.notes)


@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "bert", "roberta"])
def test_peft_computes_the_same_with_what_is_written(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = network(family, adapter={"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r"})
    made = section(family, adapter={"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r"})
    tree, x = trained(net, 0), inputs(family, 4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree)), {})
    _, name, _ = CONFIGS[family]
    bare = getattr(transformers, name).from_pretrained(
        base(family), num_labels=net.head_shape[0], ignore_mismatched_sizes=True, local_files_only=True
    )
    model = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    with torch.no_grad():
        found = model(pixel_values=x) if family == "vit" else model(input_ids=x)
    torch.testing.assert_close(found.logits, net.logits(tree, x), rtol=1e-6, atol=1e-6)
    # and back: what peft writes begins a run
    model.save_pretrained(tmp_path / "again")
    begun = section(
        family, adapter={"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r", "start": str(tmp_path / "again")}
    )
    again = begun.network(IMAGES if family == "vit" else TOKENS)
    assert_equal(again.initialize(11), tree)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(layers?|h)\.1\..*(q_proj|query|c_attn|fc1|up_proj)"])
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "bert", "roberta"])
def test_targets_as_a_text_are_the_layers_that_peft_takes(family: str, targets: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _, name, _ = CONFIGS[family]
    bare = getattr(transformers, name).from_pretrained(base(family), local_files_only=True)
    kind = None if family == "vit" else "SEQ_CLS"
    model = peft.get_peft_model(bare, peft.LoraConfig(r=2, target_modules=targets, task_type=kind))
    theirs = {name.removeprefix("base_model.model.") for name, one in model.named_modules() if hasattr(one, "lora_A")}
    if family == "vit":  # without a task peft does not know which layer is the head
        theirs.discard("classifier")
    net = network(family, adapter={"r": 2, "targets": targets})
    assert {name.removeprefix("model.") for name in net.sites} == theirs and theirs


def test_an_adapter_to_begin_from_is_checked_and_counts(tmp_path: Path) -> None:
    net, made = network("vit"), section("vit")
    write_adapter(tmp_path / "one", trained(net, 0), made.peft_settings(list(net.parameter_names)), {})
    with pytest.raises(ConfigError, match="has an adapter"):
        write_adapter(tmp_path / "one", trained(net, 0), {}, {})
    start = {"r": 3, "alpha": 6, "start": str(tmp_path / "one")}
    with pytest.raises(ModelError, match=r"needs model\.adapter\.r=3 model\.adapter\.alpha=6"):
        section("vit", adapter={**start, "r": 4}).network(IMAGES)
    with pytest.raises(ModelError, match=r"does not fit model\.adapter\.targets"):
        section("vit", adapter={**start, "targets": ["q_proj"]}).network(IMAGES)
    with pytest.raises(ModelError, match="has no adapter of peft"):
        section("vit", adapter={**start, "start": str(tmp_path / "none")}).network(IMAGES)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    configs = [
        load_config(
            Experiment, experiment(tmp_path, "run", "fedavg", model={"adapter": {**start, "start": str(place)}}), {}
        )
        for place in (tmp_path / "one", tmp_path / "two")
    ]
    assert configs[0].fingerprint() == configs[1].fingerprint()
    assert configs[0].fingerprint() != load_config(Experiment, experiment(tmp_path, "run", "fedavg"), {}).fingerprint()
    settings = json.loads((tmp_path / "two" / SETTINGS).read_text())
    (tmp_path / "two" / SETTINGS).write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora=True, which cannot be continued"):
        section("vit", adapter={**start, "start": str(tmp_path / "two")}).network(IMAGES)
    settled = section("vit", adapter=start).settled()
    content = bytearray((tmp_path / "one" / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / "one" / WEIGHTS).write_bytes(bytes(content))
    with pytest.raises(ModelError, match=r"but model\.adapter\.sha256 is"):
        settled.network(IMAGES)


def test_the_command_line_makes_describes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_STEPS", 2)
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
        ({"name": "superfed", "start": 0.0, "adapters": "products"}, "lambda=0.3", 2),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name != "fedbn"])
def test_every_method_trains_over_adapters(name: str, tmp_path: Path) -> None:
    train = {"optimizer": "sgd", "momentum": 0.5, **TRAIN.get(name, {})}
    more = {key: value for key, value in SECTIONS.get(name, {}).items() if key != "model"}
    rayfl.run(experiment(tmp_path, "run", EVERY[name], train=train, **more))
    assert pq.read_table(tmp_path / "run" / "rounds.parquet").num_rows > 0
