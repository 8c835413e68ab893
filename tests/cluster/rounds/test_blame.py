"""A client that ends or blocks its process is one that fails: named, left out or tried again as configured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.scaffold import Scaffold
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ClientError, RunError
from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import StoredFile
from tests.cluster.rounds.test_client_policy import SKIP, assert_same_but_for_the_note, cohorts, rows
from tests.cluster.rounds.test_recovery import ActorKiller
from tests.support.experiments import assert_same, outcome, small_experiment

DEADLINE_S = 4


def experiment(tmp_path: Path, name: str, how: str, failing: list[list[int]], **cluster: Any) -> dict[str, Any]:
    """The small experiment, in which clients (round, client) fail."""
    config = small_experiment(tmp_path, name, "scaffold", **cluster) | {"clients": SKIP}
    return config | {
        "algorithm": {"name": "tests.support.faulty:Faulty", "failing": failing, "how": how, "marker": None}
    }


EXITS = {
    "exit": r"ExitError: SystemExit\(3\) would end the whole process: raise an Exception",
    "interrupt": r"ExitError: KeyboardInterrupt\(\) would end the whole process: raise an Exception",
    "mute": "MuteError: no message: its __str__ raised ValueError",
}


@pytest.mark.parametrize("how", EXITS)
def test_in_this_process_too_what_would_end_it_is_the_clients_failure(how: str, tmp_path: Path) -> None:
    sampled = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))
    failing = [[1, sampled[1][0]]]
    config = experiment(tmp_path, "run", how, failing, backend="inline")
    with pytest.raises(ClientError, match=rf"client {failing[0][1]}, round 2, local_update: {EXITS[how]}\n"):
        rayfl.run(config | {"clients": {}})
    rayfl.run(config)
    [(round, client, procedure, reason)] = rows(tmp_path / "run")
    assert (round, client, procedure) == (2, failing[0][1], "local_update")
    assert reason.startswith(EXITS[how].replace("\\", "")[:30])


def test_a_state_that_no_commit_can_hold_is_the_methods_error(tmp_path: Path) -> None:
    bad = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))[0][1]
    config = experiment(tmp_path, "run", "slash", [[0, bad]], backend="inline")
    message = rf"client {bad}, round 1, local_update: MethodError: client.state .* without '/', got 'control/global'"
    with pytest.raises(ClientError, match=message) as caught:
        rayfl.run(config)
    assert "faulty.py" in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("how", "times"),
    [("quit", 1), *((how, 2) for how in ("hang", "exit", "quit", "crash"))],
)
def test_on_ray_such_a_client_is_left_out_as_if_it_had_not_been_sampled(how: str, times: int, tmp_path: Path) -> None:
    sampled = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))
    plan = [(1, sampled[1][0]), (2, sampled[2][1])][:times]
    # max_failures is for deaths that nobody explains.
    config = experiment(tmp_path, "run", how, [list(one) for one in plan], num_actors=times) | {"max_failures": 0}
    config["clients"] = {**SKIP, "deadline_s": DEADLINE_S}
    rayfl.run(config)
    reasons = {
        "exit": "ExitError: SystemExit(3) would end the whole process: raise an Exception",
        "hang": f"no end within clients.deadline_s={DEADLINE_S} s",
        "quit": "its process ended, each time",
        "crash": "its process ended, each time",
    }
    assert rows(tmp_path / "run") == [(round + 1, client, "local_update", reasons[how]) for round, client in plan]
    rayfl.run(experiment(tmp_path, "inline", "raise", [list(one) for one in plan], backend="inline"))
    assert_same_but_for_the_note(outcome(tmp_path / "inline"), outcome(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_client_that_blocks_all_threads_of_its_process_is_found_by_doing_suspects_alone(tmp_path: Path) -> None:
    bad = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))[1][1]
    config = experiment(tmp_path, "run", "seize", [[1, bad]], num_actors=2) | {"max_failures": 0}
    rayfl.run(config | {"clients": {**SKIP, "deadline_s": DEADLINE_S}})
    assert rows(tmp_path / "run") == [(2, bad, "local_update", f"no end within clients.deadline_s={DEADLINE_S} s")]


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_retries_count_processes_that_ended(tmp_path: Path) -> None:
    calm = small_experiment(tmp_path, "calm", "scaffold", backend="inline")
    rayfl.run(calm)
    bad = cohorts(calm)[1][1]
    policy = {"on_error": "retry", "retries": 1, "deadline_s": DEADLINE_S}
    once = experiment(tmp_path, "once", "hang", [[1, bad]], num_actors=2) | {"max_failures": 0, "clients": policy}
    once["algorithm"]["marker"] = str(tmp_path / "marker")
    rayfl.run(once)
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "once"))
    always = experiment(tmp_path, "always", "quit", [[1, bad]], num_actors=2) | {"max_failures": 0, "clients": policy}
    with pytest.raises(ClientError, match=f"client {bad}, round 2, local_update: its process ended.*tried 2 times"):
        rayfl.run(always)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_client_that_ends_its_process_in_the_evaluation_is_missing_there_only(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", num_actors=2)
    config |= {
        "clients": SKIP,
        "max_failures": 0,
        "algorithm": {"name": "tests.support.faulty:FaultyRows", "failing": [[1, 3]]},
    }
    result = rayfl.run(config)
    assert rows(tmp_path / "run") == [(2, 3, "predictors", "its process ended, each time")]
    everyone = [row for row in result.rounds.to_pylist() if row["cohort"] == "all" and row["split"] == "test"]
    assert {(row["round"], row["clients"]) for row in everyone} == {(2, 4), (4, 5)}


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_without_a_policy_the_message_names_the_client_that_was_at_work(tmp_path: Path) -> None:
    bad = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))[1][1]
    config = experiment(tmp_path, "run", "quit", [[1, bad]], num_actors=1) | {"clients": {}}
    killer = ActorKiller(after_round=-1, delay_s=0)  # only listens
    with pytest.raises(RunError, match=rf"after 4 failures.*\(it had local_update of client {bad} in round 2\)"):
        rayfl.run(config, callbacks=[killer])
    assert len(killer.failures) == 3


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_the_deadline_is_each_clients_own(tmp_path: Path) -> None:
    """Three clients of two and a half seconds on one actor are longer than four."""
    sampled = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))
    config = experiment(tmp_path, "run", "slow", [[1, client] for client in sampled[1]], num_actors=1)
    rayfl.run(config | {"clients": {"deadline_s": DEADLINE_S}, "max_failures": 0})
    assert rows(tmp_path / "run") == []


class SlowlyWritten(Scaffold):
    """SCAFFOLD in processes whose first commit takes longer than the deadline."""

    name: str = "slowly_written"

    async def local_update(self, client: Client, model: Tree, control: Tree) -> Weighted:
        if CommitStore.write_states is _WRITE:
            CommitStore.write_states = _write_slowly  # type: ignore[method-assign, assignment]
        return await super().local_update(client, model, control)


_WRITE = CommitStore.write_states


def _write_slowly(store: CommitStore, *args: Any) -> StoredFile:
    if store not in _SLOW:
        _SLOW.append(store)
        time.sleep(DEADLINE_S + 2)
    return _WRITE(store, *args)


_SLOW: list[CommitStore] = []
"""The stores of this process that have been slow."""


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_the_deadline_is_not_for_commits(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", num_actors=1)
    config["algorithm"] = {"name": "tests.cluster.rounds.test_blame:SlowlyWritten"}
    started = time.monotonic()
    rayfl.run(config | {"clients": {"deadline_s": DEADLINE_S}, "max_failures": 0})
    assert time.monotonic() - started > DEADLINE_S + 2


def test_ctrl_c_while_a_client_is_at_work_is_no_failure_of_the_client(tmp_path: Path) -> None:
    bad = cohorts(small_experiment(tmp_path, "x", "scaffold", backend="inline"))[2][0]
    config = experiment(tmp_path, "run", "signal", [[2, bad]], backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config)
    assert not (tmp_path / "run" / "skipped.parquet").exists() or rows(tmp_path / "run") == []
