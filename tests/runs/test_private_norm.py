"""Finished runs whose clients keep normalization layers: what reads models puts the clients' own into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import rayfl
from algorithms.registry import Experiment
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ConfigError
from rayfl.models.private_norm import STATE
from rayfl.plots.output import write_plot
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.rows import where
from tests.support.commands import command
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module", params=["fedbn", "superfed-mm"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of five clients some have never been sampled: they have the initial layers."""
    folder = tmp_path_factory.mktemp("runs")
    bases = {method: small_experiment(folder, method, method, backend="inline") for method in ("fedbn", request.param)}
    train = {"rounds": 2, "clients_per_round": 1, "private_norm": "all"}
    content = {**bases[request.param], "model": bases["fedbn"]["model"], "evaluation": {"every": 2}}
    rayfl.run({**content, "train": {**content["train"], **train}})
    return open_run(str(folder / request.param), Experiment, trust=True)


def test_committed_models_have_the_scores_of_the_tables(run: RunFolder) -> None:
    models = CommittedModels(run)
    sampled = {client for client in range(5) if STATE in models.state(client)}
    assert 0 < len(sampled) < 5
    for client in range(5):
        rows = where(run.clients, client=client, cohort="all", split="test", round=2).to_pylist()
        examples = run.parts.dataset.load(client)["test"]
        found = evaluate(models.predictors(client), examples, run.parts.task, 512)
        single = [row for row in rows if row["model"] in found]
        assert single and [found[row["model"]].loss for row in single] == [row["loss"] for row in single]


def test_an_exported_model_has_the_clients_own_layers(run: RunFolder, tmp_path: Path) -> None:
    models, file = CommittedModels(run), tmp_path / "model.safetensors"
    client = next(client for client in range(5) if STATE in models.state(client))
    row = [] if run.method == "fedbn" else ["--model", "lambda=0.0"]
    command("export", run.uri, "--client", str(client), "--out", str(file), "--trust", *row)
    found = load_file(file)
    assert all(tensor.numel() for tensor in found.values())
    assert all(found[name].equal(own) for name, own in models.state(client)[STATE].items())


def test_one_model_for_all_is_not_there_to_be_drawn(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.private_norm=all each client has .* that landscape could draw"):
        write_plot("landscape", [run], tmp_path / "f.png", plane="random")
