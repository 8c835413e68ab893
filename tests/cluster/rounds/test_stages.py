"""Runs whose data change: what clients train on and are scored on, who takes part, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rayfl
from algorithms.base import Algorithm
from algorithms.clients import Clients
from algorithms.registry import METHODS, Experiment
from cluster.run import run_config
from rayfl.config.loading import load_config
from rayfl.data.partitions.assignment import to_parquet
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.runs.committed import CommittedModels
from rayfl.runs.finding import load_run
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.membership import caveat
from rayfl.runs.participation import participants
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tasks.base import Predictor
from tests.support.experiments import (
    EVERY,
    OF_ADAPTERS,
    PRETRAINED,
    Interrupt,
    assert_same,
    each_method,
    outcome,
    small_experiment,
)
from tests.support.toys import assert_equal

CLASSES = {"name": "classes", "count": 2, "rounds": 2}
KINDS: dict[str, dict[str, Any]] = {
    "classes": CLASSES,
    "own": {**CLASSES, "order": "own", "memory": 5},
    "samples": {"name": "samples", "count": 3, "rounds": 1},
    "clients": {"name": "clients", "count": 2, "rounds": 2},
    "rotation": {"name": "rotation", "count": 2, "rounds": 2, "degrees": 90},
    "labels": {"name": "labels", "count": 4, "rounds": 1, "share": 0.5},
}
KEEP = {"storage": {"keep_commits": 9}}


class Listening(Algorithm):
    """Has the server keep what clients say of their training samples, and changes nothing else."""

    name: str = "listening"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        counted = {f"n_{k}": torch.tensor(int(n)) for k, n in zip(cohort, clients.num_samples(cohort), strict=True)}
        told = clients.map(self.tell, cohort, {})
        return {"told": {**counted, **{str(client): found for client, found in told.items()}}}

    async def tell(self, client: Client) -> Tree:
        part = client.examples()
        return {"labels": part.y.sort().values, "sum": part.x.double().sum(), "stage": client.context.stage}

    def init(self, task: Any, context: Any) -> Tree:
        return {"w": task.network.initialize(0), "told": {}}

    def global_predictors(self, server: Tree, task: Any) -> dict[str, Any]:
        return {"global": Predictor.of(server["w"])}


def experiment(folder: Path, name: str, method: str, kind: str, **changes: Any) -> dict[str, Any]:
    return small_experiment(folder, name, method, backend="inline") | {"stages": KINDS[kind]} | KEEP | changes


def of(folder: Path) -> RunFolder:
    return open_run(str(folder), Experiment, trust=True)


def server_after(folder: Path, rounds: int) -> Tree:
    store = CommitStore(Storage(str(folder)))
    manifest = next(entry.manifest for entry in store.survey(False, []) if entry.manifest.rounds_completed == rounds)
    return store.read_server(manifest)


def table(folder: Path, name: str = "clients", **where: Any) -> pa.Table:
    found = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return pa.Table.from_pylist([row for row in found if all(row[key] == value for key, value in where.items())])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.two_cases
def test_inv_stages_2_methods_see_the_samples_of_the_round_s_stage_and_no_others(kind: str, tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", "fedavg", kind) | {"algorithm": {"name": f"{__name__}:Listening"}}
    rayfl.run(content)
    parts = of(tmp_path / "run").parts
    for round in range(4):
        told, there = server_after(tmp_path / "run", round + 1)["told"], parts.dataset_in(round)
        cohort = sorted(int(name) for name in told if name.isdigit())
        assert cohort == parts.cohort(round) and len(cohort) >= 2
        for client in cohort:
            own, known = there.load(client)["train"], told[str(client)]
            assert np.array_equal(known["labels"], own.y.sort().values) and len(own)
            assert float(known["sum"]) == float(own.x.double().sum())
            assert int(known["stage"]) == parts.config.stages.stage_of(round)
            assert int(told[f"n_{client}"]) == len(own) == there.sizes()[client, 0]


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_stages_3_a_first_stage_is_a_run_on_its_samples_alone(mode: str, tmp_path: Path) -> None:
    everybody = {"partition": {"name": "iid", "num_clients": 5}, "engine": {"mode": mode}}
    rayfl.run(
        experiment(tmp_path, "staged", "ditto", "samples", **everybody) | {"stages": {**KINDS["samples"], "rounds": 2}}
    )
    parts = of(tmp_path / "staged").parts
    rows = parts.assignment.to_pandas()
    first = {(k, int(i)) for k in range(5) for i in parts.dataset_in(0).places(k)["train"]}
    there = [row.split != "train" or (row.client, row.sample) in first for row in rows.itertuples()]
    (tmp_path / "first.parquet").write_bytes(to_parquet(parts.assignment.filter(pa.array(there))))
    alone = {"partition": {"name": "file", "path": str(tmp_path / "first.parquet")}, "stages": {"name": "none"}}
    content = experiment(tmp_path, "alone", "ditto", "samples", **everybody) | alone
    rayfl.run(content | {"train": content["train"] | {"rounds": 2}})
    assert_equal(server_after(tmp_path / "staged", 2), server_after(tmp_path / "alone", 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["superfed-mm", "scaffold"])
@pytest.mark.first_case
def test_an_interrupted_run_continues_to_the_same_bits(kind: str, method: str, tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole", method, kind))
    pieces = experiment(tmp_path, "pieces", method, kind)
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


@pytest.mark.parametrize("name", each_method(sorted(EVERY.keys() - PRETRAINED - OF_ADAPTERS.keys()), quick=set()))
def test_every_method_runs_while_samples_arrive_and_drift(name: str, tmp_path: Path) -> None:
    for kind in ("samples", "own", "labels"):
        content = experiment(tmp_path, kind, name, kind)
        if "labelled" in content or "system" in content or name == "fedcorr":
            pytest.skip("refused by name")
        assert rayfl.run(content).rounds_completed == 4


def test_samples_of_each_stage_so_far_are_scored_at_the_end_of_a_stage(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", "fedavg", "classes") | {"partition": {"name": "iid", "num_clients": 5}}
    rayfl.run(content | {"evaluation": {"every": 3}})
    parts, folder = of(tmp_path / "run").parts, tmp_path / "run"
    scored = {(row["round"], row["split"]) for row in table(folder, cohort="all").to_pylist()}
    assert {split for round, split in scored if round == 2} == {"validation", "test", "stage_1"}
    assert {split for round, split in scored if round == 3} == {"validation", "test"}
    assert {split for round, split in scored if round == 4} == {"validation", "test", "stage_1", "stage_2"}
    for round in (2, 4):
        for client in range(5):
            rows = table(folder, round=round, client=client, cohort="all", model="global").to_pylist()
            count = {row["split"]: row["n"] for row in rows}
            right = {row["split"]: row["n"] * row["top1"] for row in rows}
            stages = [split for split in count if split.startswith("stage_")]
            assert count["test"] == sum(count[split] for split in stages)
            assert count["test"] == len(parts.dataset_in(round - 1).load(client)["test"])
            assert right["test"] == pytest.approx(sum(right[split] for split in stages))


def test_models_of_a_commit_meet_the_samples_of_its_round(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "fedavg", "classes") | {"partition": {"name": "iid", "num_clients": 5}})
    run = of(tmp_path / "run")
    for rounds, most in ((2, 4), (4, 9)):
        models = CommittedModels(run, rounds)
        assert int(models.pooled("test", 10**6).y.max()) == most
        assert np.array_equal(models.client(1).examples().y, run.parts.dataset_in(rounds - 1).labels(1)["train"])
        assert "members are of the last stage's classes" in caveat(models)


def test_clients_without_samples_wait_and_no_others(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", "fedavg", "classes", seed=2)
    result = rayfl.run(content | {"train": content["train"] | {"clients_per_round": 2}})
    parts = of(Path(result.path)).parts
    asked: dict[int, set[int]] = {round: set() for round in range(4)}
    for row in table(tmp_path / "run", cohort="selected").to_pylist():
        asked[row["round"] - 1].add(row["client"])
    for round, cohort in asked.items():
        able = {k for k in range(5) if len(parts.dataset_in(round).load(k)["train"])}
        assert cohort == set(parts.cohort(round)) <= able and set(parts.able(round)) == able < set(range(5))
        assert len(cohort) == 2
    known = participants(load_run(result.path, METHODS))
    assert known is not None
    assert {(row["round"] - 1, row["client"]) for row in known.to_pylist()} == {
        (round, client) for round, cohort in asked.items() for client in cohort
    }


def test_a_run_of_more_rounds_goes_on_with_its_stages(tmp_path: Path) -> None:
    longer = experiment(tmp_path, "longer", "fedavg", "samples")
    rayfl.run(longer | {"train": longer["train"] | {"rounds": 2}})
    assert run_config(load_config(Experiment, longer, []), extends=True).rounds_completed == 4
    rayfl.run(experiment(tmp_path, "whole", "fedavg", "samples"))
    assert_equal(server_after(tmp_path / "longer", 4), server_after(tmp_path / "whole", 4))
