"""Language models over a base, trained by federated methods: looped and stacked, begun from adapters, and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config, preset_names
from rayfl.errors import ConfigError, DataError, ModelError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.models.pretrained import making, output_layer
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.peft_files import SETTINGS, write_adapter
from rayfl.results.schemas import metrics_of
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.bases import (
    CAUSAL,
    CONFIGS,
    NEXT,
    base,
    language_network,
    language_section,
    texts,
    trained,
    transformers,
)
from tests.support.experiments import EVERY, SECTIONS, TRAIN, outcome
from tests.support.toys import assert_close, assert_equal

A, B, D = 4 * 2 * 32, (32 + 16) * 2 * 2, (32 + 16) * 32 * 2
"""Scalars of all first and second factors of rank 2 on the queries (32) and values (16) of the small Llama, and of a
matrix for each of these layers."""


def experiment(folder: Path, name: str, method: Any, **sections: Any) -> dict[str, Any]:
    """Five clients of made-up texts, two rounds of three, in this process."""
    return {
        "name": name,
        "storage_path": str(folder),
        "task": "language_model",
        "dataset": {"name": "synthetic_text", "num_clients": 5, "texts": 14, "length": 10, "vocabulary": 20},
        "holdout": {"test": 0.3, "validation": 0.2},
        "model": {
            "name": "pretrained", "folder": str(base("llama", causal=True)), "adapter": {"r": 2, "alpha": 4},
            "head": {"train": False}, **sections.pop("model", {}),
        },
        "algorithm": method,
        "train": {
            "rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 3, "lr": 0.02, "optimizer": "adamw",
            **sections.pop("train", {}),
        },
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **sections,
    }  # fmt: skip


SENT: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "FedIT": ({"name": "fedavg"}, {}, A + B),
    "FFA-LoRA": ({"name": "fedavg"}, {"adapter": {"r": 2, "alpha": 4, "trains": ["b"]}}, B),
    "FedSA-LoRA": ({"name": "fedper", "head_group": "lora_b"}, {}, A),
    "Ditto": ({"name": "ditto"}, {}, A + B),
    # The cosine of two equal adapters has a gradient of round-off alone, of which Adam would make whole steps.
    "SuperFed": ({"name": "superfed", "mode": "mm", "start": 0.5}, {"optimizer": "sgd"}, A + B),
    "SuperFed of products": ({"name": "superfed", "start": 0.5, "adapters": "products"}, {"optimizer": "sgd"}, A + B),
    "APFL": ({"name": "apfl"}, {}, A + B),
    "FedDPA": ({"name": "feddpa", "local_epochs": 1}, {}, A + B),
    "FedALT": ({"name": "fedalt"}, {}, A + B),
    "HetLoRA": ({"name": "hetlora"}, {}, A + B),
    "FLoRA": ({"name": "flora"}, {}, (D, A + B)),
    "FlexLoRA": ({"name": "flexlora"}, {}, A + B),
    "FedEx-LoRA": ({"name": "fedex_lora"}, {}, (D + A + B, A + B)),
    "RoLoRA": ({"name": "rolora"}, {}, (A + B, {B, A})),
    "LoRA-FAIR": ({"name": "lora_fair"}, {}, A + B),
}
"""By method: its configuration, changes of the model or of training, and how many scalars travel; down and up, or up in
one of the rounds."""

QUICK = ("Ditto",)
"""Of the quick suite, which has all of them over a vision transformer (``test_runs.py``)."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SENT])
def test_messages_are_adapters_alone_and_stacks_are_looped_clients(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output_layer, "LOGITS", 7 * 50)  # the output layer is computed in parts of 7 positions
    method, changes, scalars = SENT[name]
    for mode in ("looped", "vectorized"):
        settings = {"train": changes} if "optimizer" in changes else {"model": changes}
        rayfl.run(experiment(tmp_path, mode, method, **settings, engine={"mode": mode}))
    assert not any("lacks something" in record.message for record in caplog.records)
    last = json.loads((tmp_path / "looped" / "result.json").read_text().splitlines()[-1])
    assert any(key.startswith("perplexity_worst5/test, all clients") for key in last)
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    # Adam divides by the gradients' size: round-off of the smallest is a larger part of a step (0.02). With other
    # instructions of the same processor (ATEN_CPU_CAPABILITY=default) one mode differs from itself by 8e-5 after FedDPA
    # and 6e-5 after FedALT, and by 2e-9 if they train with SGD.
    atol = 1e-5 if changes.get("optimizer") == "sgd" else 1e-4
    assert_close(one.server, other.server, atol)
    for client in one.states:
        assert_close(one.states[client], other.states[client], atol)
    rows = one.clients.to_pylist()
    sent = [row for row in rows if row["bytes_down"] is not None and row["cohort"] == "selected"]
    down, up = (scalars, scalars) if isinstance(scalars, int) else scalars
    ups = up if isinstance(up, set) else {up}
    assert sent and {(row["bytes_down"], row["bytes_up"]) for row in sent} == {(4 * down, 4 * one) for one in ups}
    assert [metric.name for metric in metrics_of(one.rounds)] == ["perplexity", "token_accuracy", "exact_match", "loss"]
    for row in rows:
        if row["split"] is not None:
            assert row["perplexity"] == pytest.approx(np.exp(row["loss"])) and 0 <= row["exact_match"] <= 1


def test_a_uniform_model_has_a_perplexity_of_its_vocabulary(tmp_path: Path) -> None:
    config, _, options = CONFIGS["gpt2"]
    made = transformers.GPT2LMHeadModel(getattr(transformers, config)(**options))
    with torch.no_grad():
        made.lm_head.weight.zero_()
    made.save_pretrained(tmp_path / "uniform")
    result = rayfl.run(
        experiment(
            tmp_path, "run", "fedavg", model={"folder": str(tmp_path / "uniform")}, train={"rounds": 1, "lr": 0.0}
        )
    )
    values = [value for value in result.clients["perplexity"].to_pylist() if value is not None]
    assert values and np.allclose(values, 50, rtol=1e-6)


@pytest.mark.parametrize("family", CAUSAL)
def test_peft_computes_the_same_with_what_is_written(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    options = {"adapter": {"r": 3, "alpha": 6, "scaling": "alpha_over_sqrt_r"}}
    net, made = language_network(family, **options), language_section(family, **options)
    tree, (x, _) = trained(net, 0), texts(4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree), NEXT.target), {})
    bare = transformers.AutoModelForCausalLM.from_pretrained(base(family, causal=True), local_files_only=True)
    assert type(bare).__name__ == CAUSAL[family]
    model = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    assert type(model).__name__ == "PeftModelForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=x).logits, net.logits(tree, x), rtol=1e-6, atol=1e-6)
    # and back: what peft writes begins a run
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    begun = language_section(family, adapter={**options["adapter"], "start": str(tmp_path / "again")}).network(NEXT)
    assert_equal(begun.initialize(11), tree)


def test_a_run_is_exported_and_another_begins_from_it(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", {"name": "ditto"}))
    out = tmp_path / "adapter"
    found = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--client", "1", "--format", "peft", "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    settings = json.loads((out / SETTINGS).read_text())
    assert settings["task_type"] == "CAUSAL_LM" and settings["modules_to_save"] is None
    adapter = {"r": 2, "alpha": 4, "start": str(out)}
    config = load_config(Experiment, experiment(tmp_path, "next", "fedavg", model={"adapter": adapter}), {})
    assert config.model.adapter.sha256 is not None
    begun = config.model.network(NEXT).initialize(0)
    assert any(".lora_B." in name and leaf.any() for name, leaf in begun.items())


def test_a_small_base_is_made_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "TRAINING_STEPS", 3)
    made = making.make("tiny-lm", tmp_path / "lm")
    assert made.sha256 == BaseFolder(tmp_path / "lm").sha256 == making.make("tiny-lm", tmp_path / "again").sha256
    config = load_config(Experiment, "quickstart-lm", {"model.folder": str(tmp_path / "lm")})
    task = Parts(config).task
    assert task.network.head_shape == (258, 64) and len(task.network.sites) == 2 * 7


def test_presets_say_what_they_need(tmp_path: Path) -> None:
    assert {"quickstart-lm", "flowertune-alpaca"} <= set(preset_names())
    with pytest.raises(ModelError, match="rayfl model make tiny-lm --out"):
        rayfl.run("quickstart-lm", model__folder=str(tmp_path / "tiny-lm"), storage_path=str(tmp_path))
    with pytest.raises(DataError, match=r"alpaca_gpt4_data\.json"):
        rayfl.run("flowertune-alpaca", dataset__tokenizer="bytes", storage_path=str(tmp_path))


@pytest.mark.slow
def test_flowertunes_settings_run_over_a_file_in_alpacas_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(making, "TRAINING_STEPS", 2)
    making.make("tiny-lm", tmp_path / "lm")
    rows = [
        {"instruction": f"Count to {n}.", "input": "", "output": " ".join(map(str, range(n)))} for n in range(1, 61)
    ]
    file = tmp_path / "alpaca_gpt4_data.json"
    file.write_text(json.dumps(rows))
    settings: dict[str, Any] = {
        "dataset.path": str(file), "dataset.tokenizer": "bytes", "dataset.length": 200,
        "model.folder": str(tmp_path / "lm"),
        "partition.num_clients": 3, "holdout.test": 0.2, "train.batch_size": 4, "train.max_local_steps": 2,
        "train.rounds": 2, "evaluation.every": 2, "cluster.backend": "inline", "tracking.tensorboard": False,
        "engine.precision": "float32", "storage_path": str(tmp_path), "name": "run",
    }  # fmt: skip
    result = rayfl.run("flowertune-alpaca", **settings)
    assert result.config.train.schedule.minimum == 1e-6 and result.config.model.checkpointing
    assert len(result.rounds)


def test_a_run_is_tied_to_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    library = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    words = library.Tokenizer(library.models.WordLevel({"</s>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    file, rows = tmp_path / "tokenizer.json", tmp_path / "rows.json"
    words.save(str(file))
    rows.write_text(json.dumps([{"q": "a b a"[: 1 + 2 * (n % 3)], "output": "b a"} for n in range(30)]))
    data = {"name": "instructions", "path": str(rows), "tokenizer": str(file), "template": "{q}"}
    rayfl.run(experiment(tmp_path, "run", "fedavg", dataset=data, partition={"name": "iid", "num_clients": 4}))
    folder = tmp_path / "run"
    assert not verify(Storage(str(folder))).problems
    words.save(str(file), pretty=True)
    file.write_text(file.read_text() + " ")
    (problem,) = verify(Storage(str(folder))).problems
    assert "but dataset.tokenizer_sha256 in config.yaml is" in problem
    with pytest.raises(DataError, match=r"but dataset\.tokenizer_sha256 is .*: it was changed"):
        rayfl.run(str(folder), train__rounds=3)
    file.unlink()
    report = verify(Storage(str(folder)))
    assert not report.problems and any("the tokenizer" in note for note in report.notes)


def test_what_needs_more_than_a_language_model_has_is_refused(tmp_path: Path) -> None:
    for method, message in (
        ("floco", r"model\.lm_head\.weight' has requires_grad=False"),
        ({"name": "per_fedavg", "version": "exact"}, "the output layer of a language model has none"),
        ("fedbabu", "head"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            rayfl.run(experiment(tmp_path, "run", method))


NO_LANGUAGE_MODEL = re.compile(
    r"learns from|task=|needs|no normalization layer|last layer|has none|trains nothing|train\.optimizer=sgd"
    r"|hides the classes"
)


_OF_DATA = ("model", "task", "dataset", "partition")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_method_trains_a_language_model_or_says_why_not(name: str, tmp_path: Path) -> None:
    train = {"optimizer": "sgd", "momentum": 0.5, **TRAIN.get(name, {})}
    more = {key: value for key, value in SECTIONS.get(name, {}).items() if key not in _OF_DATA}
    if "holdout" in more:
        more["holdout"] = {"test": 0.3, "validation": 0.2, "public": 5}
    refused = ""
    try:
        rayfl.run(experiment(tmp_path, "run", EVERY[name], train=train, **more))
    except RayflError as error:
        refused = str(error)
    if refused:
        assert NO_LANGUAGE_MODEL.search(refused), refused
        assert not list(tmp_path.glob("*/commits/*"))
    else:
        assert pq.read_table(tmp_path / "run" / "rounds.parquet").num_rows > 0
