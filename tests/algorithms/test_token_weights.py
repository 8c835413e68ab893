"""Weights by the tokens that language models learn: of the mean, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import rayfl
from algorithms.base import Averaging
from algorithms.parts.token_weights import tokens_of
from algorithms.registry import Experiment
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.models.pretrained import making
from tests.support.experiments import METHODS, outcome, small_experiment

pytest.importorskip("transformers", reason="the extra transformers is not installed")

ROWS = ((2, 40), (6, 3), (4, 17))
"""By client: how many rows it has, and how long their answers are."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of bytes."""
    folder = tmp_path_factory.mktemp("base") / "lm"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(making, "TRAINING_STEPS", 2)
        making.make("tiny-lm", folder)
    return folder


@pytest.fixture
def experiment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three clients whose shares of tokens are not those of samples, one round."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    rows = [
        {
            "instruction": f"Say {client} {i}.",
            "output": "ab" * length + "c" * i,
            "client": f"c{client}",
            "split": "train" if i < count else "test",
        }
        for client, (count, length) in enumerate(ROWS)
        for i in range(count + 1)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return {
        "name": "run",
        "storage_path": str(tmp_path),
        "task": "language_model",
        "dataset": {"name": "instructions", "path": str(tmp_path / "rows.json"), "tokenizer": "bytes", "length": 150,
                    "template": "Question: {instruction}\nAnswer:"},
        "partition": "natural",
        "holdout": {"test": None, "validation": 0.0},
        "model": {"name": "pretrained", "folder": str(model), "adapter": {"r": 2}, "head": {"train": False}},
        "algorithm": {"name": "fedavg", "aggregation": "tokens"},
        "train": {"rounds": 1, "clients_per_round": "all", "batch_size": 2, "lr": 0.05},
        "evaluation": {"every": 1},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
    }  # fmt: skip


def test_the_mean_is_that_of_a_hand_computation(experiment: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, Weighted] = {}
    weighted = Averaging.weighted

    def noted(self: Averaging, client: Client, tree: Any) -> Weighted:
        sent[client.id] = weighted(self, client, tree)
        return sent[client.id]

    monkeypatch.setattr(Averaging, "weighted", noted)
    rayfl.run(experiment)
    tokens = {k: sum(2 * length + i + 2 for i in range(count)) for k, (count, length) in enumerate(ROWS)}
    # A blank before each answer and the token that ends it are learned, too.
    assert {k: one.weight for k, one in sent.items()} == tokens == {0: 165, 1: 63, 2: 150}
    mean = outcome(Path(experiment["storage_path"]) / "run").server["model"]
    for name, leaf in mean.items():
        by_hand = sum(
            (tokens[k] * one.tree[name].double() for k, one in sent.items()), torch.zeros((), dtype=torch.float64)
        ) / sum(tokens.values())
        # One division of an exact sum: the float32 next to it.
        torch.testing.assert_close(leaf, by_hand.float(), rtol=1.2e-7, atol=0)


@pytest.mark.slow
def test_weights_by_tokens_are_others_than_by_samples(experiment: dict[str, Any]) -> None:
    folder = Path(experiment["storage_path"])
    for name, method in (("whole", "fedavg"), ("shared", {"name": "fedper", "head_group": "lora_b"})):
        settings = {"algorithm": {**({"name": method} if isinstance(method, str) else method), "aggregation": "tokens"}}
        rayfl.run({**experiment, **settings, "name": name})
        by_samples = {"algorithm": {**settings["algorithm"], "aggregation": "samples"}}
        rayfl.run({**experiment, **by_samples, "name": f"{name}-samples"})
        one, other = (outcome(folder / run).server for run in (name, f"{name}-samples"))
        tree, same = one[next(iter(one))], other[next(iter(other))]
        assert any(not torch.equal(tree[leaf], same[leaf]) for leaf in tree)


def stand_in(y: Tensor, asked: Any = lambda y: y != -100) -> Any:
    """A client with some targets."""
    return SimpleNamespace(id=3, num_samples=len(y), examples=lambda: SimpleNamespace(y=y),
                           task=SimpleNamespace(asked=asked))  # fmt: skip


def test_tokens_that_are_not_asked_for_count_for_nothing() -> None:
    targets = torch.tensor([[-100, 5, 6, -100], [-100, -100, 0, -100]])
    assert tokens_of(stand_in(targets)) == 3
    for client in (stand_in(torch.full((2, 4), -100)), stand_in(torch.zeros(2), lambda y: None)):
        with pytest.raises(ConfigError, match="client 3 has none among its 2 training samples"):
            tokens_of(client)


def test_a_task_without_tokens_is_refused_before_anything_starts(tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    with pytest.raises(ConfigError, match=r"task=classification predicts none: set algorithm\.aggregation=samples"):
        rayfl.run({**content, "algorithm": {"name": "fedprox", "aggregation": "tokens"}})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="allowed: samples, uniform, population"):
        load_config(Experiment, {**content, "algorithm": {"name": "fedcac", "aggregation": "tokens"}}, {})


def test_the_option_at_its_default_changes_no_fingerprint(experiment: dict[str, Any]) -> None:
    def fingerprint(method: Any) -> str:
        return load_config(Experiment, {**experiment, "algorithm": method}, {}).fingerprint()

    assert fingerprint("fedavg") == fingerprint({"name": "fedavg", "aggregation": "samples"})
    assert fingerprint("fedavg") != fingerprint({"name": "fedavg", "aggregation": "tokens"})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_takes_the_option_gives_its_weights_by_it(name: str, tmp_path: Path) -> None:
    """Methods whose server weights clients itself know numbers of samples alone."""
    method = load_config(Experiment, small_experiment(tmp_path, "run", name), {}).algorithm
    field = type(method).model_fields.get("aggregation")
    if field is None or "tokens" not in get_args(field.annotation):
        return
    chosen = method.model_copy(update={"aggregation": "tokens"})
    assert chosen.weighted(stand_in(torch.zeros(2, 5).long()), {}).weight == 10
    needs = {trait for trait in chosen.needed() if trait in ("classes", "features")}
    source = Path(__file__).parents[2].joinpath(f"{type(method).__module__.replace('.', '/')}.py").read_text()
    # One that reads the option itself has it do something else than weighted() does; no language model gets there.
    assert needs or "self.aggregation" not in source


def test_the_number_of_tokens_is_that_of_the_training_samples(experiment: dict[str, Any]) -> None:
    experiment["holdout"] = {"test": None, "validation": 0.5}
    parts = Parts(load_config(Experiment, experiment, {}))
    for client, (count, _) in enumerate(ROWS):
        own = parts.dataset.load(client)["train"]
        assert len(own) < count
        reader: Any = SimpleNamespace(id=client, examples=lambda own=own: own, task=parts.task)
        assert tokens_of(reader) == int((own.y != -100).sum()) > 0
