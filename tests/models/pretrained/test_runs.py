"""Whole runs over a pretrained base: what travels, what identifies them, and what leaves as files of peft."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.experiment.parts import Parts
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.peft_files import SETTINGS, WEIGHTS, write_adapter
from rayfl.params import leaves
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.adapter_runs import ADAPTERS, experiment
from tests.support.bases import (
    CONFIGS,
    IMAGES,
    TOKENS,
    base,
    inputs,
    network,
    section,
    trained,
    transformers,
)
from tests.support.experiments import outcome
from tests.support.toys import assert_close, assert_equal

A, B, M, D, HEAD = 4 * 2 * 32, 4 * 32 * 2, 4 * 32, 4 * 32 * 32, 32 * 10 + 10
"""Scalars of all first and second factors, of magnitudes and of a matrix for each of these layers, and of the head, of
the small vision transformer."""


SENT: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "FedIT": ({"name": "fedavg"}, {}, A + B + HEAD),
    "FFA-LoRA": ({"name": "fedavg"}, {"adapter": {**ADAPTERS, "trains": ["b"]}}, B + HEAD),
    "FedSA-LoRA": ({"name": "fedper", "head_group": "lora_b_and_head"}, {}, A),
    "FedIT with DoRA": ({"name": "fedavg"}, {"adapter": {**ADAPTERS, "use_dora": True}}, A + B + M + HEAD),
    "FedSA-LoRA with DoRA": (
        {"name": "fedper", "head_group": "lora_b_and_head"},
        {"adapter": {**ADAPTERS, "use_dora": True}},
        A,
    ),
    "FedPer": ({"name": "fedper"}, {}, A + B),
    "LG-FedAvg of B": ({"name": "lg_fedavg", "head_group": "lora_b"}, {}, B),
    "Ditto": ({"name": "ditto"}, {}, A + B + HEAD),
    "FedDPA": ({"name": "feddpa", "local_epochs": 1}, {}, A + B + HEAD),
    "FedALT": ({"name": "fedalt"}, {}, A + B),
    "HetLoRA": ({"name": "hetlora"}, {}, A + B + HEAD),
    "FLoRA": ({"name": "flora"}, {}, (D + HEAD, A + B + HEAD)),
    "FlexLoRA": ({"name": "flexlora"}, {}, A + B + HEAD),
    "FedEx-LoRA": ({"name": "fedex_lora"}, {}, (D + A + B + HEAD, A + B + HEAD)),
    "RoLoRA": ({"name": "rolora"}, {}, (A + B + HEAD, A + HEAD)),
    "LoRA-FAIR": ({"name": "lora_fair"}, {}, A + B + HEAD),
}
"""By method: its configuration, changes of the model, and how many scalars travel; down and up."""
QUICK = ("FedIT with DoRA", "FedSA-LoRA", "FedPer", "HetLoRA")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name not in QUICK else []) for name in SENT],
)
@pytest.mark.first_case
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
    down, up = (scalars, scalars) if isinstance(scalars, int) else scalars
    assert sent and {(row["bytes_down"], row["bytes_up"]) for row in sent} == {(4 * down, 4 * up)}
    names = {path.rpartition("/")[2] for path, leaf in leaves(one.server) if isinstance(leaf, torch.Tensor)}
    assert all(".lora_" in leaf or ".classifier." in leaf or leaf.endswith(".delta") for leaf in names)


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
@pytest.mark.first_case
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


@pytest.mark.two_cases
@pytest.mark.parametrize("family", CONFIGS)
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
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
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


def test_the_trained_head_of_an_adapter_is_not_replaced_by_the_folders(tmp_path: Path) -> None:
    net, made = network("roberta"), section("roberta")
    tree = trained(net, 0)
    write_adapter(tmp_path / "one", tree, made.peft_settings(list(tree)), {})
    adapter = {"r": 3, "alpha": 6, "start": str(tmp_path / "one")}
    for head, option in (
        ({"init": "folder"}, r"model\.head\.init=folder"),
        ({"train": False}, "model.head.train=false"),
    ):
        with pytest.raises(
            ModelError, match=f"{option} takes the head of .*, but the adapter in .*one was trained with"
        ):
            network("roberta", adapter=adapter, head=head)
    assert_equal(network("roberta", adapter=adapter).initialize(0), tree)
    # What was exported of a head that stayed the folder's goes on with it.
    kept = network("roberta", head={"train": False})
    whole = {**trained(kept, 0), **kept.fixed_parameters}
    write_adapter(tmp_path / "two", whole, made.peft_settings(list(whole)), {})
    for head in ({"train": False}, {"init": "folder"}):
        begun = network("roberta", adapter={**adapter, "start": str(tmp_path / "two")}, head=head)
        assert_equal({**begun.initialize(0), **begun.fixed_parameters}, whole)


def test_an_adapter_to_begin_from_is_checked_and_counts(tmp_path: Path) -> None:
    net, made = network("vit"), section("vit")
    write_adapter(tmp_path / "one", trained(net, 0), made.peft_settings(list(net.parameter_names)), {})
    with pytest.raises(ConfigError, match="has an adapter"):
        write_adapter(tmp_path / "one", trained(net, 0), {}, {})
    start = {"r": 3, "alpha": 6, "start": str(tmp_path / "one")}
    with pytest.raises(ModelError, match=r"needs model\.adapter\.r=3 model\.adapter\.alpha=6"):
        section("vit", adapter={**start, "r": 4}).network(IMAGES)
    older = json.loads((tmp_path / "one" / SETTINGS).read_text())
    del older["use_rslora"]
    write_adapter(tmp_path / "older", trained(net, 0), older, {})
    again = section("vit", adapter={**start, "start": str(tmp_path / "older")}).network(IMAGES)
    assert_equal(again.initialize(1), trained(net, 0))
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
    with pytest.raises(ModelError, match=r"needs .* model\.adapter\.use_dora=true"):
        section("vit", adapter={**start, "start": str(tmp_path / "two")}).network(IMAGES)
    settled = section("vit", adapter=start).settled()
    content = bytearray((tmp_path / "one" / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / "one" / WEIGHTS).write_bytes(bytes(content))
    with pytest.raises(ModelError, match=r"but model\.adapter\.sha256 is"):
        settled.network(IMAGES)
