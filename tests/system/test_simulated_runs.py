"""Whole runs with simulated devices."""

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
from rayfl.errors import ConfigError, DamageError, RunError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import ROUNDS_SCHEMA, SIMULATED_ROUNDS_SCHEMA
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment
from tests.support.toys import assert_equal

GIVEN = {"name": "given", "computation": [10, 20, 30, 40, 500], "communication": [1000] * 5}
HARD = {
    "name": "sampled",
    "computation": {"name": "lognormal", "median": 40, "sigma": 1},
    "availability": {"name": "constant", "value": 0.9},
    "over_sampling": 1.4,
    "dropout": 0.2,
    "deadline_s": 60,
}


def experiment(folder: Path, name: str, system: dict[str, Any] | None, method: str = "scaffold") -> dict[str, Any]:
    content = small_experiment(folder, name, method, backend="inline")
    return content if system is None else {**content, "system": system}


def parts_of(folder: Path, system: dict[str, Any]) -> Parts:
    return Parts(load_config(Experiment, experiment(folder, "parts", system), {}))


def test_simulated_time_is_in_the_tables(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "run", GIVEN, "fedavg"))
    assert result.rounds.schema.equals(SIMULATED_ROUNDS_SCHEMA)
    parts = parts_of(tmp_path, GIVEN)
    sizes = parts.dataset.sizes()[:, 0]
    model = sum(leaf.numel() * leaf.element_size() for leaf in parts.initial_server()["model"].values())
    expected, now = {}, 0.0
    for round in range(4):
        # one epoch, three passes; FedAvg sends its model down and up
        times = [3 * sizes[k] * GIVEN["computation"][k] / 1000 + 2 * model * 8 / 1e6 for k in parts.cohort(round)]  # type: ignore[index]
        now += max(times)
        expected[round + 1] = now
    found = dict(zip(result.rounds["round"].to_pylist(), result.rounds["simulated_s"].to_pylist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    assert sum(line["simulated"] for line in lines) == pytest.approx(now, abs=1e-4)
    assert pq.read_table(tmp_path / "run" / "devices.parquet").column("computation").to_pylist() == GIVEN["computation"]
    assert not verify(Storage(str(tmp_path / "run"))).problems


def test_drop_outs_equal_a_run_whose_cohort_was_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = rayfl.run(experiment(tmp_path, "dropped", {**GIVEN, "dropout": 0.4}))
    left_out: dict[int, set[int]] = {}
    for row in dropped.skipped.to_pylist():
        assert (row["procedure"], row["reason"]) == ("system", "dropped out")
        left_out.setdefault(row["round"] - 1, set()).add(row["client"])
    assert left_out
    usual = Parts.cohort

    def smaller(parts: Parts, round: int) -> list[int]:
        return [client for client in usual(parts, round) if client not in left_out.get(round, ())]

    monkeypatch.setattr(Parts, "cohort", smaller)
    rayfl.run(experiment(tmp_path, "smaller", None))
    one, other = outcome(tmp_path / "dropped"), outcome(tmp_path / "smaller")
    assert_equal(one.server, other.server)
    assert_equal(one.states, other.states)
    assert one.clients.equals(other.clients)
    assert one.rounds.drop_columns(["simulated_s"]).equals(other.rounds)


def test_the_deadline_drops_the_slowest(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "run", {**GIVEN, "deadline_s": 60}))
    assert set(result.skipped["client"].to_pylist()) == {4}
    assert set(result.skipped["reason"].to_pylist()) == {"later than the deadline"}
    selected = result.clients.filter(pc.field("cohort") == "selected")
    assert 4 not in selected["client"].to_pylist()


@pytest.mark.parametrize("method", ["scaffold", "floco"])
@pytest.mark.first_case
def test_a_simulated_run_continues_to_the_same_bits(method: str, tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole", HARD, method))
    pieces = experiment(tmp_path, "pieces", HARD, method)
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_a_round_without_clients_changes_nothing_but_the_clock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = rayfl.run(experiment(tmp_path, "run", {**GIVEN, "deadline_s": 0.001}))
    assert result.rounds_completed == 4
    assert not result.rounds.filter(pc.field("cohort") == "selected").num_rows
    last = max(result.rounds["simulated_s"].to_pylist())
    assert last == pytest.approx(0.004)
    loss = result.rounds.filter((pc.field("model") == "global") & (pc.field("split") == "test"))["loss"].to_pylist()
    assert loss[0] == loss[-1]
    assert "no client took part in any round after 0" in caplog.text
    caplog.clear()
    rayfl.run(experiment(tmp_path, "other", {**GIVEN, "deadline_s": 60}))
    assert "no client took part" not in caplog.text


def test_without_a_system_everything_is_as_it_was(tmp_path: Path) -> None:
    off = experiment(tmp_path, "off", {"name": "none"})
    config = load_config(Experiment, off, {})
    assert config.fingerprint() == load_config(Experiment, experiment(tmp_path, "off", None), {}).fingerprint()
    assert config.fingerprint() != load_config(Experiment, experiment(tmp_path, "off", GIVEN), {}).fingerprint()
    result = rayfl.run(off)
    assert result.rounds.schema.equals(ROUNDS_SCHEMA)
    assert not (tmp_path / "off" / "devices.parquet").exists()
    manifest = json.loads(sorted((tmp_path / "off" / "commits").glob("manifest*"))[-1].read_text())
    assert set(manifest["counters"]) == {"bytes_down", "bytes_up"}


def test_a_trace_that_has_changed_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "speeds.json"
    trace.write_text(json.dumps([{"computation": 1, "communication": 1}]))
    content = experiment(tmp_path, "run", {"name": "trace", "devices": str(trace)})
    rayfl.run(content)
    trace.write_text(json.dumps([{"computation": 2, "communication": 1}]))
    with pytest.raises(RunError, match="other devices"):
        rayfl.run(content)


def test_what_does_not_fit_the_clients_is_found_before_anything_is_written(tmp_path: Path) -> None:
    short = {**GIVEN, "computation": [1]}
    with pytest.raises(ConfigError, match="has 1 values, but there are 5 clients"):
        rayfl.run(experiment(tmp_path, "run", short))
    content = experiment(tmp_path, "run", {**GIVEN, "over_sampling": 2})
    with pytest.raises(ConfigError, match="asks all clients already"):
        rayfl.run(content, **{"train.clients_per_round": "all"})
    with pytest.raises(ConfigError, match="did you mean 'sampled'"):
        rayfl.run(content, system="sampeld")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["l2gd", "fedme"])
@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        ({"dropout": 0.3}, "system.dropout=0"),
        ({"deadline_s": 1}, "system.deadline_s=null"),
        ({"availability": [1, 1, 1, 1, 0.5]}, "always available"),
    ],
)
def test_methods_of_all_clients_refuse_devices_that_leave_some_out(
    method: str, loss: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{method} cannot do without: .*{fix}"):
        rayfl.run(experiment(tmp_path, "run", {**GIVEN, **loss}, method))
    assert not list(tmp_path.iterdir())
    Parts(load_config(Experiment, experiment(tmp_path, "run", GIVEN, method), {})).check()


def test_local_training_of_all_clients_in_every_round_refuses_them_too(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", {**GIVEN, "dropout": 0.3}, "local")
    Parts(load_config(Experiment, content, {})).check()
    content["algorithm"]["schedule"], content["train"]["clients_per_round"] = "all", "all"
    with pytest.raises(ConfigError, match=r"local cannot do without: with algorithm\.schedule=all .*system\.dropout=0"):
        Parts(load_config(Experiment, content, {})).check()


def test_tensorboard_has_simulated_time_beside_wall_clock(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rayfl.run({**experiment(tmp_path, "run", GIVEN), "tracking": {"tensorboard": True}})
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {"time/simulated", "time/seconds per round"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("time/simulated")] == [1, 2, 3, 4]


def test_lost_rounds_of_a_simulated_run_do_not_mix_with_those_that_follow(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", GIVEN)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(content, callbacks=[Interrupt(2)])
    for path in [*(tmp_path / "run" / "commits").glob("rounds-*"), tmp_path / "run" / "rounds.parquet"]:
        path.unlink()
    result = rayfl.run(content)
    assert result.rounds.schema.equals(SIMULATED_ROUNDS_SCHEMA)
    assert set(result.rounds["round"].to_pylist()) == {3, 4}
    assert verify(Storage(str(tmp_path / "run"))).problems == []


def test_other_devices_than_recorded_are_found(tmp_path: Path) -> None:
    content = experiment(tmp_path, "run", GIVEN)
    rayfl.run(content)
    path = tmp_path / "run" / "devices.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, table.schema.field(0), table.column(0).take(list(range(5))[::-1])), path)
    assert any("devices.parquet in" in problem for problem in verify(Storage(str(tmp_path / "run"))).problems)
    path.write_bytes(b"x")
    with pytest.raises(DamageError, match=r"devices\.parquet is damaged"):
        rayfl.run(content)
