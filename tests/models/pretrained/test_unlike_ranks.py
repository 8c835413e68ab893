"""Runs whose clients have adapters of unlike ranks: what travels, what is reported, and what leaves as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from cluster.rounds.forking import fork
from rayfl.errors import ConfigError
from rayfl.models.pretrained.peft_files import SETTINGS
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter, export_merged
from rayfl.runs.folder import open_run
from tests.models.pretrained.test_runs import HEAD, D
from tests.support.adapter_runs import ADAPTERS, experiment
from tests.support.bases import IMAGES, inputs, section, transformers

ONE = 4 * (32 + 32)
"""Scalars of one rank of all adapters."""


@pytest.mark.parametrize(
    "name", ["hetlora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flora", "flexlora"))]
)
def test_a_client_s_messages_have_its_own_rank(name: str, tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "run", {"name": name, "ranks": [1, 2]}, train={"clients_per_round": "all"}))
    rows = [row for row in result.clients.to_pylist() if row["bytes_up"] is not None and row["cohort"] == "selected"]
    up = {row["client"]: row["bytes_up"] for row in rows}
    down = {row["client"]: row["bytes_down"] for row in rows}
    if name != "hetlora":  # it may prune
        assert up == {client: 4 * ((1, 2)[client % 2] * ONE + HEAD) for client in range(5)}
    assert up[0] == 4 * (ONE + HEAD)
    assert set(down.values()) <= ({4 * (D + HEAD)} if name == "flora" else {4 * (rank * ONE + HEAD) for rank in (1, 2)})
    # no error of averaged factors: products are averaged, or factors with other weights than reported ones
    assert {row.get("product_error") for row in result.rounds.to_pylist()} == {None}


def test_a_truncated_adapter_leaves_with_its_own_rank(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", {"name": "flexlora", "ranks": [2, 1]}))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    export_adapter(models, 1, None, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (1, ADAPTERS["alpha"] / 2)
    start = {"r": 1, "alpha": ADAPTERS["alpha"] / 2, "start": str(tmp_path / "adapter")}
    plain, x = section("vit", adapter=start).network(IMAGES), inputs("vit", 5, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(models.predictor(1, "truncated").built()[0], x)
        torch.testing.assert_close(plain.logits(plain.initialize(0), x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flora", pytest.param("fedex_lora", marks=pytest.mark.slow)])
def test_what_was_added_to_the_base_leaves_as_weights_and_not_as_an_adapter(name: str, tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", name))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    with pytest.raises(ConfigError, match="--format peft: 'global' adds a whole matrix to each layer"):
        export_adapter(models, 1, None, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    export_merged(models, 1, None, tmp_path / "merged")
    kind: Any = transformers.AutoModelForImageClassification
    loaded = kind.from_pretrained(tmp_path / "merged", local_files_only=True)
    predictor, x = models.predictor(1, "global"), inputs("vit", 5, 0)
    with torch.no_grad():
        expected = models.parts.task.network.logits(predictor.built()[0], x)
        torch.testing.assert_close(loaded.eval()(pixel_values=x).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_fork_keeps_the_ranks_that_the_server_has_given(tmp_path: Path) -> None:
    run = experiment(
        tmp_path, "run", {"name": "hetlora", "ranks": [1, 2]}, train={"rounds": 1}, evaluation={"every": 1}
    )
    rayfl.run(run)
    with pytest.raises(ConfigError, match=r"server's tree is another.*\(ranks/0, "):
        fork(str(tmp_path / "run"), "other", 1, ["algorithm.ranks=[2, 1]", "train.rounds=2"])
