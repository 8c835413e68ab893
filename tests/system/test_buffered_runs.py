"""Whole runs without a barrier: what is in their tables and commits, and that they continue to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, RunError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import BUFFERED_CLIENTS_SCHEMA, BUFFERED_ROUNDS_SCHEMA
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.system.unfinished import KEY, separated
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.system.test_simulated_runs import Interrupt

SLOW_AND_FAST = {
    "name": "given",
    "computation": [10, 20, 30, 40, 120],
    "communication": [1000] * 5,
    "mode": "buffered",
    "concurrency": 4,
}
HARD = {
    "name": "sampled",
    "mode": "buffered",
    "concurrency": 5,
    "computation": {"name": "lognormal", "median": 40, "sigma": 1.5},
    "availability": {"name": "constant", "value": 0.8},
    "dropout": 0.2,
    "deadline_s": 60,
}


def experiment(folder: Path, name: str, system: dict[str, Any] | None = None, **algorithm: Any) -> dict[str, Any]:
    content = small_experiment(folder, name, "fedavg", backend="inline")
    return {
        **content,
        "system": SLOW_AND_FAST if system is None else system,
        "algorithm": {"name": "fedbuff", **algorithm},
        "train": {**content["train"], "clients_per_round": 2, "rounds": 8},
    }


def test_staleness_and_simulated_time_are_in_the_tables(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "run"))
    assert result.rounds.schema.equals(BUFFERED_ROUNDS_SCHEMA)
    assert result.clients.schema.equals(BUFFERED_CLIENTS_SCHEMA)
    trained = result.clients.filter((pc.field("phase") == "trained") & (pc.field("split") == "test")).to_pylist()
    rows = {row["round"]: row for row in result.rounds.to_pylist()}
    assert set(rows) == set(range(1, 9))
    for round, row in rows.items():
        ages = [one["staleness"] for one in trained if one["round"] == round]
        assert len(ages) == 2
        assert (row["staleness"], row["staleness_max"]) == (sum(ages) / 2, max(ages))
    assert max(row["staleness_max"] for row in rows.values()) >= 2
    everybody = result.clients.filter(pc.field("cohort") == "all")
    assert everybody["staleness"].null_count == everybody.num_rows > 0
    times = [rows[round]["simulated_s"] for round in sorted(rows)]
    assert times == sorted(times) and times[0] > 0
    assert not verify(Storage(str(tmp_path / "run"))).problems


def test_late_updates_are_used(tmp_path: Path) -> None:
    late = rayfl.run(experiment(tmp_path, "buffered"))
    assert 4 in late.clients.filter(pc.field("cohort") == "selected")["client"].to_pylist()
    last = late.rounds["simulated_s"].to_pylist()[-1]
    synchronous = {name: value for name, value in SLOW_AND_FAST.items() if name not in ("mode", "concurrency")}
    content = experiment(tmp_path, "synchronous", synchronous)
    waiting = rayfl.run({**content, "algorithm": {"name": "fedavg"}})
    assert last < waiting.rounds["simulated_s"].to_pylist()[-1]


@pytest.mark.parametrize(
    "system", [pytest.param(SLOW_AND_FAST, id="given", marks=pytest.mark.slow), pytest.param(HARD, id="hard")]
)
def test_inv_buff_7_a_run_continues_to_the_same_bits(system: dict[str, Any], tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole", system, server_momentum=0.3))
    pieces = experiment(tmp_path, "pieces", system, server_momentum=0.3)
    for after in (1, 2, 5):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    assert not verify(Storage(str(tmp_path / "pieces"))).problems


@pytest.mark.slow
def test_commits_that_are_further_apart_rewind_what_is_under_way(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole"))
    pieces = {**experiment(tmp_path, "pieces"), "storage": {"commit_every": 3}}

    class Crash(Interrupt):
        def on_round(self, rounds_completed: int, cohort: list[int], seconds: float) -> None:
            if rounds_completed == self._after:
                raise RuntimeError("a crash between two commits")

    with pytest.raises(RuntimeError):
        rayfl.run(pieces, callbacks=[Crash(5)])
    manifest = CommitStore(Storage(str(tmp_path / "pieces"))).latest()
    assert manifest is not None and manifest.rounds_completed == 3
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_a_commit_has_what_is_under_way_beside_the_model(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run"))
    store = CommitStore(Storage(str(tmp_path / "run")))
    manifest = store.latest()
    assert manifest is not None and manifest.counters["clock_events"] > 0
    content = store.read_server(manifest)
    server, unfinished = separated(content)
    assert set(content) == {"model", KEY} and set(server) == {"model"}
    assert unfinished.beside(server)[KEY]["updates"] == content[KEY]["updates"]
    assert {update.began for update in unfinished.updates} == set(unfinished.past)
    assert len(unfinished.updates) in (2, 3)  # of four slots, two or one of which the last round has freed
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    assert set(models.server) == {"model"} and set(models.predictors(4)) == {"global"}


def test_skipped_clients_say_why_their_updates_were_lost(tmp_path: Path) -> None:
    rows = rayfl.run(experiment(tmp_path, "run", HARD)).skipped.to_pylist()
    assert rows and {row["procedure"] for row in rows} == {"system"}
    assert any(row["reason"].startswith("dropped out") for row in rows)


def test_lost_rows_of_such_a_run_do_not_mix_with_those_that_follow(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(content, callbacks=[Interrupt(3)])
    for name in ("rounds", "clients"):
        for path in [*(tmp_path / "run" / "commits").glob(f"{name}-*"), tmp_path / "run" / f"{name}.parquet"]:
            path.unlink()
    result = rayfl.run(content)
    assert result.rounds.schema.equals(BUFFERED_ROUNDS_SCHEMA)
    assert result.clients.schema.equals(BUFFERED_CLIENTS_SCHEMA)
    assert set(result.rounds["round"].to_pylist()) == {4, 5, 6, 7, 8}


def test_a_method_and_a_mode_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    none = experiment(tmp_path, "run", {"name": "none"})
    with pytest.raises(ConfigError, match=r"fedbuff has rounds without a barrier.*system.mode=buffered"):
        rayfl.run(none)
    synchronous = {name: value for name, value in SLOW_AND_FAST.items() if name not in ("mode", "concurrency")}
    with pytest.raises(ConfigError, match="fedbuff has rounds without a barrier"):
        rayfl.run(experiment(tmp_path, "run", synchronous))
    with pytest.raises(ConfigError, match=r"scaffold expects that a round's clients all begin with it.*fedbuff"):
        rayfl.run({**experiment(tmp_path, "run"), "algorithm": {"name": "scaffold"}}, **{"train.momentum": 0})
    with pytest.raises(ConfigError, match="concurrency is 6, but there are only 5 clients"):
        rayfl.run(experiment(tmp_path, "run"), **{"system.concurrency": 6})
    with pytest.raises(ConfigError, match="concurrency needs mode=buffered"):
        rayfl.run(experiment(tmp_path, "run"), **{"system.mode": "synchronous"})
    with pytest.raises(ConfigError, match="leave over_sampling out"):
        rayfl.run(experiment(tmp_path, "run"), **{"system.over_sampling": 1.5})
    with pytest.raises(ConfigError, match=r"waits for the updates of 5 clients .* later than the deadline"):
        rayfl.run(experiment(tmp_path, "run"), **{"system.deadline_s": 30, "train.clients_per_round": "all"})
    assert not list(tmp_path.iterdir())


def test_rounds_without_a_barrier_are_not_replayed(tmp_path: Path) -> None:
    from cluster.replay import replay

    rayfl.run(experiment(tmp_path, "run"))
    with pytest.raises(RunError, match="simulated devices cannot be replayed"):
        replay(open_run(str(tmp_path / "run"), Experiment), 3, 0)


def test_synchronous_systems_identify_runs_as_before(tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    plain = {"name": "given", "computation": [10] * 5, "communication": [1000] * 5}
    config = load_config(Experiment, {**content, "system": plain}, {})
    identity = config.identity()
    assert "mode" not in identity["system"] and "concurrency" not in identity["system"]
    said = load_config(Experiment, {**content, "system": {**plain, "mode": "synchronous"}}, {})
    assert said.fingerprint() == config.fingerprint()
    assert Parts(config).buffered is False
    buffered = load_config(Experiment, experiment(tmp_path, "run"), {})
    fewer = load_config(Experiment, experiment(tmp_path, "run", {**SLOW_AND_FAST, "concurrency": 3}), {})
    assert buffered.fingerprint() != fewer.fingerprint()


def test_first_messages_are_as_long_as_the_model_alone(tmp_path: Path) -> None:
    config = load_config(Experiment, experiment(tmp_path, "run", server_momentum=0.9), {})
    parts = Parts(config)
    server = parts.initial_server()
    model = sum(leaf.numel() * leaf.element_size() for leaf in server["model"].values())
    assert set(server) == {"model", "momentum"}
    assert (parts.first_clock(server).down, parts.first_clock(server).up) == (model, model)


def test_timings_have_the_virtual_seconds_of_each_round(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    last = max(result.rounds["simulated_s"].to_pylist())
    assert sum(line["simulated"] for line in lines) == pytest.approx(last, abs=1e-4)
    assert pq.read_table(tmp_path / "run" / "devices.parquet").num_rows == 5


def test_a_simulated_run_from_before_there_were_modes_continues(tmp_path: Path) -> None:
    plain = {name: value for name, value in SLOW_AND_FAST.items() if name not in ("mode", "concurrency")}
    content = {**small_experiment(tmp_path, "run", "fedavg", backend="inline"), "system": plain}
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(content, callbacks=[Interrupt(2)])
    config = tmp_path / "run" / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line not in ("  mode: synchronous\n", "  concurrency: null\n")]
    assert len(kept) == len(lines) - 2
    config.write_text("".join(kept))
    assert rayfl.run(content).rounds_completed == 4
