"""Clients that fail: the run fails, or goes on to the bit as if they had not been sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rayfl
from actors.hosting import procedures
from actors.hosting.equipment import Equipment
from actors.hosting.job import ClientResult, Job
from actors.hosting.replies import found_of
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ClientError, RunError
from rayfl.experiment.parts import Parts
from tests.cluster.rounds.test_recovery import ActorKiller, long_rounds
from tests.support.experiments import (
    FEW,
    METHODS,
    Interrupt,
    Outcome,
    assert_same,
    each_method,
    outcome,
    small_experiment,
)
from tests.support.toys import assert_equal

NEEDS_ALL = {"l2gd", "fedme", "centralized", "drfa", "fedcorr", "scaffnew"}
SKIP = {"on_error": "skip"}


def cohorts(config: dict[str, Any]) -> list[list[int]]:
    """The sampled clients of all rounds."""
    parts = Parts(load_config(Experiment, config, {}))
    return [parts.cohort(round) for round in range(parts.config.train.rounds)]


def rows(folder: Path) -> list[tuple[int, int, str, str]]:
    table = pq.read_table(folder / "skipped.parquet").to_pylist()
    return [(row["round"], row["client"], row["procedure"], row["reason"]) for row in table]


def assert_same_but_for_the_note(left: Outcome, right: Outcome) -> None:
    assert_equal(left.server, right.server)
    assert_equal(left.states, right.states)
    assert left.rounds.equals(right.rounds)
    assert left.clients.equals(right.clients)


def fail(monkeypatch: pytest.MonkeyPatch, plan: set[tuple[int, int]], procedure: str | None = None) -> None:
    """Makes clients fail by (round, client), in one procedure or in all but those that ask all clients."""

    def failing(own: Equipment, job: Job, client: Client, *others: Any) -> ClientResult:
        others_asked = ("signal", "moments", "shared_features", "compare", "predictors", "class_losses")
        meant = job.procedure == procedure if procedure else job.procedure not in others_asked
        if (job.round, client.id) in plan and meant:
            raise RuntimeError("made up")
        return found_of(own, job, client, *others)

    monkeypatch.setattr(procedures, "found_of", failing)


@pytest.mark.parametrize("method", each_method(sorted(set(METHODS) - NEEDS_ALL), FEW))
@pytest.mark.two_cases
def test_a_skipped_client_is_as_if_it_had_not_been_sampled(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_experiment(tmp_path, "skipped", method, backend="inline") | {"clients": SKIP}
    sampled = cohorts(config)
    # one of three, all, and two of three
    plan = {(1, sampled[1][0]), *((2, client) for client in sampled[2]), (3, sampled[3][1]), (3, sampled[3][2])}
    with monkeypatch.context() as patch:
        fail(patch, plan)
        rayfl.run(config)
    found = rows(tmp_path / "skipped")
    assert [(round, client) for round, client, *_ in found] == [(round + 1, client) for round, client in sorted(plan)]
    assert {reason for *_, reason in found} == {"RuntimeError: made up"}
    algorithm = load_config(Experiment, config, {}).algorithm
    assert all(callable(getattr(algorithm, procedure)) for *_, procedure, _ in found)

    left = {round: [c for c in cohort if (round, c) not in plan] for round, cohort in enumerate(sampled)}
    monkeypatch.setattr(Parts, "cohort", lambda self, round: left[round])
    rayfl.run(small_experiment(tmp_path, "unsampled", method, backend="inline"))
    assert_same_but_for_the_note(outcome(tmp_path / "skipped"), outcome(tmp_path / "unsampled"))


@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("procedure", ["report", "adopt"])
@pytest.mark.two_cases
def test_a_client_that_fails_after_it_has_contributed_takes_no_part_either(
    procedure: str, commit_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_experiment(tmp_path, "skipped", "fedpac", backend="inline")
    config |= {"clients": SKIP, "storage": {"commit_every": commit_every}}
    sampled = cohorts(config)
    plan = {(0, sampled[0][2]), (2, sampled[2][0])}
    with monkeypatch.context() as patch:
        fail(patch, plan, procedure)
        rayfl.run(config)
    found = rows(tmp_path / "skipped")
    assert found == [(round + 1, client, procedure, "RuntimeError: made up") for round, client in sorted(plan)]
    left = {round: [c for c in cohort if (round, c) not in plan] for round, cohort in enumerate(sampled)}
    monkeypatch.setattr(Parts, "cohort", lambda self, round: left[round])
    rayfl.run(small_experiment(tmp_path, "unsampled", "fedpac", backend="inline"))
    assert_same_but_for_the_note(outcome(tmp_path / "skipped"), outcome(tmp_path / "unsampled"))


def test_clients_that_all_fail_in_the_first_round_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline") | {"clients": SKIP}
    with monkeypatch.context() as patch:
        fail(patch, {(0, client) for client in range(6)})
        with pytest.raises(ClientError, match=r"all 3 clients of the first round failed \(client \d, .*: made up\)"):
            rayfl.run(config)
    assert "Traceback" in (tmp_path / "run" / "rayfl.log").read_text()
    rayfl.run(config)  # nothing was committed: it begins, and all of its rounds are trained
    rayfl.run(small_experiment(tmp_path, "whole", "fedavg", backend="inline"))
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("method", sorted(NEEDS_ALL))
def test_a_method_that_needs_every_client_says_so(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, {(1, client) for client in range(6)})
    config = small_experiment(tmp_path, "needed", method, backend="inline") | {"clients": SKIP}
    with pytest.raises(ClientError, match=r"client \d, round 2, \w+: .*made up; this pass .* needs every one"):
        rayfl.run(config)


def test_floco_needs_every_client_only_where_it_assigns_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_experiment(tmp_path, "floco", "floco", backend="inline") | {"clients": SKIP}
    sampled = cohorts(config)
    with monkeypatch.context() as patch:
        fail(patch, {(2, sampled[2][0])}, "local_update")  # in the round in which points are assigned
        rayfl.run(config)
    assert [row[:3] for row in rows(tmp_path / "floco")] == [(3, sampled[2][0], "local_update")]
    fail(monkeypatch, {(2, sampled[2][0])}, "signal")
    with pytest.raises(ClientError, match=r"signal: .*needs every one of its clients"):
        rayfl.run(config | {"name": "again"})


def test_ccvr_needs_every_client_only_where_it_calibrates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_experiment(tmp_path, "ccvr", "ccvr", backend="inline") | {"clients": SKIP}
    last = cohorts(config)[3]
    away = next(client for client in range(6) if client not in last)
    for client in (last[0], away):
        with monkeypatch.context() as patch:
            fail(patch, {(2, client), (3, client)}, "moments")
            with pytest.raises(
                ClientError, match=rf"client {client}, round 4, moments: .*needs every one of its clients"
            ):
                rayfl.run(config)


def test_fedfed_needs_every_client_only_where_features_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_experiment(tmp_path, "fedfed", "fedfed", backend="inline") | {"clients": SKIP}
    sampled = cohorts(config)[2]
    for client in (sampled[0], next(client for client in range(5) if client not in sampled)):
        with monkeypatch.context() as patch:
            fail(patch, {(2, client)}, "shared_features")
            with pytest.raises(ClientError, match=rf"client {client}, round 3, shared_features: .*needs every one"):
                rayfl.run(config)


def test_a_client_whose_evaluation_fails_is_missing_in_that_evaluation_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_experiment(tmp_path, "scored", "fedavg", backend="inline")
    config |= {"clients": SKIP, "evaluation": {"every": 2, "cohort_received": True}}

    def failing(own: Equipment, job: Job, client: Client, *others: Any) -> ClientResult:
        if job.kind == "evaluate" and client.id == 1 and job.round == 1:
            raise RuntimeError("made up")
        return found_of(own, job, client, *others)

    monkeypatch.setattr(procedures, "found_of", failing)
    result = rayfl.run(config)
    assert rows(tmp_path / "scored") == [(2, 1, "predictors", "RuntimeError: made up")]
    everyone = [row for row in result.rounds.to_pylist() if row["cohort"] == "all" and row["model"] == "global"]
    assert {(row["round"], row["clients"]) for row in everyone} == {(2, 4), (4, 5)}


@pytest.mark.parametrize("how", ["raise", "diverge", "spoil"])
@pytest.mark.first_case
def test_without_a_policy_a_client_that_fails_ends_the_run_which_may_then_go_on_without_it(
    how: str, tmp_path: Path
) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    bad = cohorts(config)[2][0]
    config["algorithm"] = {"name": "tests.support.faulty:Faulty", "failing": [[2, bad]], "how": how}
    with pytest.raises(ClientError, match=f"client {bad}, round 3, local_update"):
        rayfl.run(config)
    result = rayfl.run(config | {"clients": SKIP})
    assert result.rounds_completed == 4
    assert [(row["round"], row["client"]) for row in result.skipped.to_pylist()] == [(3, bad)]


@pytest.mark.parametrize("after", ["fail", "skip"])
@pytest.mark.first_case
def test_retries_give_the_bits_of_a_run_without_the_failure_and_end(after: str, tmp_path: Path) -> None:
    calm = small_experiment(tmp_path, "calm", "scaffold", backend="inline")
    bad = cohorts(calm)[1][1]
    faulty = {"name": "tests.support.faulty:Faulty", "failing": [[1, bad]]}
    policy = {"on_error": "retry", "retries": 1, "after_retries": after}
    rayfl.run(calm)
    once = {"algorithm": faulty | {"marker": str(tmp_path / "once")}, "clients": policy}
    rayfl.run(small_experiment(tmp_path, "once", "scaffold", backend="inline") | once)
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "once"))
    always = small_experiment(tmp_path, "always", "scaffold", backend="inline")
    always |= {"algorithm": faulty, "clients": policy}
    if after == "fail":
        with pytest.raises(ClientError, match=f"client {bad}, round 2"):
            rayfl.run(always)
    else:
        assert [(row["round"], row["client"]) for row in rayfl.run(always).skipped.to_pylist()] == [(2, bad)]


def faulty_experiment(tmp_path: Path, name: str, how: str, **cluster: Any) -> dict[str, Any]:
    config = small_experiment(tmp_path, name, "scaffold", **cluster) | {"clients": SKIP}
    sampled = cohorts(config)
    failing = [[1, sampled[1][0]], [2, sampled[2][1]], [2, sampled[2][2]], *([3, client] for client in sampled[3])]
    return config | {"algorithm": {"name": "tests.support.faulty:Faulty", "failing": failing, "how": how}}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "diverge"])
def test_any_number_of_actors_skips_the_same(how: str, tmp_path: Path) -> None:
    rayfl.run(faulty_experiment(tmp_path, "inline", how, backend="inline"))
    inline = outcome(tmp_path / "inline")
    assert inline.skipped.num_rows == 6
    for actors in (1, 3):
        rayfl.run(faulty_experiment(tmp_path, str(actors), how, num_actors=actors))
        assert_same(inline, outcome(tmp_path / str(actors)))


def test_an_interrupted_run_has_the_same_list_of_skipped_clients(tmp_path: Path) -> None:
    rayfl.run(faulty_experiment(tmp_path, "whole", "raise", backend="inline"))
    pieces = faulty_experiment(tmp_path, "pieces", "raise", backend="inline")
    for after in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_after_a_crash_the_list_of_skipped_clients_is_the_same(tmp_path: Path) -> None:
    rayfl.run(long_rounds(faulty_experiment(tmp_path, "calm", "raise", backend="inline")))
    killer = ActorKiller(after_round=2, delay_s=0.05)
    rayfl.run(long_rounds(faulty_experiment(tmp_path, "killed", "raise", num_actors=2)), callbacks=[killer])
    assert len(killer.failures) == 1
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_an_actor_that_hangs_counts_as_dead(tmp_path: Path) -> None:
    calm = small_experiment(tmp_path, "calm", "scaffold", backend="inline")
    rayfl.run(calm)
    bad = cohorts(calm)[2][0]
    hanging = {"name": "tests.support.faulty:Faulty", "failing": [[2, bad]], "how": "hang"}
    config = small_experiment(tmp_path, "hung", "scaffold", num_actors=2) | {"clients": {"deadline_s": 4}}
    killer = ActorKiller(after_round=-1, delay_s=0)  # only listens
    rayfl.run(config | {"algorithm": hanging | {"marker": str(tmp_path / "hung-once")}}, callbacks=[killer])
    assert len(killer.failures) == 1
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "hung"))
    message = rf"no answer within clients.deadline_s=4 s \(it had local_update of client {bad} in round 3\)"
    with pytest.raises(RunError, match=message):
        rayfl.run(config | {"name": "gone", "algorithm": hanging, "max_failures": 0})
