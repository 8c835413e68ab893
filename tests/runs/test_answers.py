"""``rayfl answers``: what a run's language models answer to their clients' prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams
from rayfl.runs.answers import answered
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.rows import where
from tests.support.bases import write_base
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up questions, of which a small Llama has learned something."""
    folder = tmp_path_factory.mktemp("answers")
    base = write_base("llama", folder / "base", causal=True, vocabulary=258)
    rayfl.run(
        {
            "name": "run",
            "storage_path": str(folder),
            "task": "language_model",
            "dataset": {"name": "synthetic_instructions", "num_clients": 3, "samples": 20, "things": 3},
            "holdout": {"test": 0.3, "validation": 0.2},
            "model": {
                "name": "pretrained", "folder": str(base), "adapter": {"r": 16, "alpha": 16, "targets": "all-linear"},
                "head": {"train": False},
            },
            "algorithm": "ditto",
            "train": {
                "rounds": 6, "clients_per_round": "all", "local_epochs": 6, "batch_size": 8, "lr": 0.01,
                "optimizer": "adamw",
            },
            "evaluation": {"every": 6},
            "engine": {"mode": "vectorized"},
            "tracking": {"tensorboard": False},
            "cluster": {"backend": "inline"},
        }
    )  # fmt: skip
    return folder / "run"


def asked(run: Path, *options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command prints for programs, and the answers that it writes."""
    out = run.parent / "answers.jsonl"
    found = CliRunner().invoke(app, ["answers", str(run), "--json", "--out", str(out), *map(str, options)])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout), [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_exact_answers_are_those_that_the_evaluation_counted(run: Path) -> None:
    for model in ("global", "personalized"):
        found, rows = asked(run, "--model", model, "--samples", 99)
        scored = where(pq.read_table(run / "clients.parquet"), model=model, split="test", cohort="all", round=6)
        expected = [row["exact_match"] for row in scored.sort_by("client").to_pylist()]
        assert model == "global" or 0 < sum(expected) < 3, "answers that are all right, or all wrong, would say nothing"
        own = [[row["exact"] for row in rows if row["client"] == client] for client in range(3)]
        assert [sum(one) / len(one) for one in own] == pytest.approx(expected)
        assert found["scores"]["exact"] == pytest.approx(sum(expected) / 3)
        assert (found["model"], found["round"], found["split"]) == (model, 6, "test")


def test_prompts_answers_and_references_are_texts(run: Path) -> None:
    found, rows = asked(run, "--client", 2, "--client", 0, "--client", 2, "--samples", 4)
    assert [row["client"] for row in rows] == [2] * 4 + [0] * 4
    assert found["scores"]["clients"] == 2 and found["scores"]["answers"] == 8
    for row in rows:
        assert "colour" in row["prompt"] and row["reference"].isalpha() and row["turn"] == 0
        assert (row["rouge_l"] == 1) == (row["answer"] == row["reference"]) or row["answer"].lower() == row["reference"]
        assert not row["exact"] or (row["ended"] and row["tokens"] == len(row["reference"]) + 1)
    short, cut = asked(run, "--client", 0, "--tokens", 2, "--split", "train")
    assert {row["tokens"] for row in cut} == {2} and short["scores"]["ended"] == 0


def test_people_see_some_answers_and_the_scores(run: Path) -> None:
    found = CliRunner().invoke(app, ["answers", str(run), "--samples", "2"])
    assert found.exit_code == 0, found.output
    assert found.output.count("reference:") == 3
    assert "after round 6, test samples of 3 clients, 6 answers" in found.output and "ROUGE-L" in found.output


@pytest.mark.slow
def test_what_has_no_prompts_is_refused(run: Path, tmp_path: Path) -> None:
    def of(folder: Path, **options: Any) -> None:
        list(answered(CommittedModels(open_run(str(folder), Experiment, False)), **options))

    rayfl.run(small_experiment(tmp_path, "classes", "fedavg") | {"cluster": {"backend": "inline"}})
    with pytest.raises(
        ConfigError, match="a run of classification; answers are of task=language_model and task=preference"
    ):
        of(tmp_path / "classes")
    texts = yaml.safe_load((run / "config.yaml").read_text())
    texts["dataset"] = {"name": "synthetic_text", "num_clients": 3, "texts": 6, "length": 8, "vocabulary": 20}
    texts |= {"name": "texts", "storage_path": str(tmp_path), "train": {**texts["train"], "rounds": 1}}
    texts["evaluation"]["every"] = 1
    rayfl.run(texts)
    with pytest.raises(ConfigError, match="its texts are learned from their first token on: answers need prompts"):
        of(tmp_path / "texts")
    with pytest.raises(ConfigError, match="there is no client 3"):
        of(run, clients=[3])
    with pytest.raises(ConfigError, match="there is no GPU here"):
        of(run, device="cuda")


@pytest.mark.slow
def test_answers_of_aligned_models_are_compared_with_the_preferred_ones(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {
        "name": "pairs", "storage_path": str(tmp_path), "task": {"name": "preference", "loss": "orpo"},
        "dataset": {"name": "synthetic_preferences", "num_clients": 3, "samples": 20, "things": 3},
    }  # fmt: skip
    config["train"] |= {"rounds": 6, "local_epochs": 6}
    config["evaluation"]["every"] = 6
    rayfl.run(config)
    found, rows = asked(tmp_path / "pairs", "--model", "personalized", "--samples", 99)
    assert len(rows) == 18 and {row["turn"] for row in rows} == {0}
    source = synthetic_colours(config)
    for row in rows:
        (thing,) = (name for name in source[row["client"]] if name in row["prompt"])
        assert row["reference"] == source[row["client"]][thing]
    assert found["scores"]["exact"] > 0.3


def synthetic_colours(config: dict[str, Any]) -> list[dict[str, str]]:
    """What each client prefers to read, by thing."""
    checked = Experiment.model_validate(config)
    streams = RandomStreams(checked.seed)
    return [checked.dataset.table(client, streams) for client in range(3)]
