"""Ways to lose part of a run that were found by reading, each with the experiment that shows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.scaffold import Scaffold
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ClientError, DamageError, ResourceError, RunError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from rayfl.tracking.callback import RunInfo
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment


class InPlace(Scaffold):
    """Writes into its state's tensors, which the framework still needs as they were."""

    name: str = "in_place"

    async def local_update(self, client: Client, model: Tree, control: Tree) -> Weighted:
        for leaf in client.state.get("control", {}).values():
            leaf.add_(1.0)
        return await super().local_update(client, model, control)


@pytest.mark.parametrize("policy", [{}, {"on_error": "skip"}, {"on_error": "retry"}])
def test_a_method_that_writes_to_states_in_place_is_refused_whatever_the_policy(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline") | {"clients": policy}
    config["algorithm"] = {"name": "tests.cluster.rounds.test_reliability:InPlace"}
    with pytest.raises(ClientError, match=r"local_update: MethodError: writes to its state's 'control/.*in place"):
        rayfl.run(config)


def interrupted(folder: Path, **changes: Any) -> dict[str, Any]:
    config = small_experiment(folder, "run", "scaffold", backend="inline") | changes
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(2)])
    return config


def test_a_lost_partition_file_is_written_again(tmp_path: Path) -> None:
    config = interrupted(tmp_path)
    path = tmp_path / "run" / "partition.parquet"
    before = path.read_bytes()
    path.unlink()
    rayfl.run(config)
    assert path.read_bytes() == before
    assert verify(Storage(str(tmp_path / "run"))).problems == []


def test_a_damaged_partition_file_is_named(tmp_path: Path) -> None:
    config = interrupted(tmp_path)
    path = tmp_path / "run" / "partition.parquet"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamageError, match=r"partition.parquet is damaged .*writes it again"):
        rayfl.run(config)


def test_without_the_partition_file_results_still_know_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = interrupted(tmp_path)
    (tmp_path / "run" / "partition.parquet").unlink()
    monkeypatch.setattr(Parts, "partition_hash", "0" * 64)
    with pytest.raises(RunError, match="are of other data than the configuration gives now"):
        rayfl.run(config)
    assert not (tmp_path / "run" / "partition.parquet").exists()


class Ending(rayfl.Callback):
    """Fails at the end."""

    def __init__(self) -> None:
        self.ended = 0

    def on_end(self, rounds_completed: int) -> None:
        self.ended += 1
        raise OSError("made up at the end")


def test_the_error_that_ended_a_run_is_the_one_that_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listeners = [Ending(), Ending()]
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(2), *listeners])
    assert [listener.ended for listener in listeners] == [1, 1]
    assert "in addition: made up at the end" in caplog.text
    with pytest.raises(OSError, match="made up at the end"):
        rayfl.run(config, callbacks=listeners)
    assert [listener.ended for listener in listeners] == [2, 2]
    assert rayfl.run(config).rounds_completed == 4


def test_the_log_has_the_traceback_of_what_ended_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> np.ndarray:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(Parts, "cohort", broken)
    with pytest.raises(ZeroDivisionError):
        rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    text = (tmp_path / "run" / "rayfl.log").read_text()
    assert "Traceback" in text
    assert "in broken" in text


class Stopper(rayfl.Callback):
    """Stops an actor's process when only the last commit is left to do."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._pid = 0
        self.failures: list[str] = []

    def on_start(self, run: RunInfo) -> None:
        self._pid = int(run.hosts[0]["pid"])

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows[0]["round"] == self._rounds and rows[0]["cohort"] == "all" and not self.failures:
            os.kill(self._pid, signal.SIGSTOP)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.failures.append(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_an_actor_that_hangs_in_the_last_commit_counts_as_dead(tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "scaffold", backend="inline"))
    stopper = Stopper(rounds=4)
    config = small_experiment(tmp_path, "hung", "scaffold", num_actors=2) | {"clients": {"deadline_s": 4}}
    rayfl.run(config, callbacks=[stopper])
    assert len(stopper.failures) == 1
    assert "no answer within clients.deadline_s=4 s" in stopper.failures[0]
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "hung"))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(("load", "words"), [(9.0, r"this machine is busy \(load 9\.0 on 4 CPUs\).*"), (3.0, "")])
def test_actors_that_do_not_start_in_time(
    load: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.processes.placement.os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("actors.processes.placement.os.cpu_count", lambda: 4)
    config = small_experiment(tmp_path, "run", "scaffold", num_actors=1, startup_timeout_s=0.001)
    expected = rf"1 of 1 actors did not start within 0\.001 s.*{words}startup_timeout_s"
    with pytest.raises(ResourceError, match=expected) as raised:
        rayfl.run(config)
    assert ("busy" in str(raised.value)) == bool(words)
