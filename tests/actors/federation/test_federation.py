"""Assignment, moving states between hosts, commits and rewinds, with hosts in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.job import Job
from actors.hosting.memory import Lookups
from actors.processes.pool import InlinePool
from rayfl.errors import ClientError
from rayfl.params import num_bytes, to_numpy
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.cases.base import SIZES
from tests.support.counting import World
from tests.support.toys import assert_equal


def test_states_follow_their_clients_from_host_to_host(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    for round, cohort in enumerate(([0, 1, 2], [2, 3, 4], [2, 5], [0, 2], [1, 2, 3, 4, 5])):
        world.train(round, cohort)
    assert world.visits() == {0: 2, 1: 2, 2: 5, 3: 2, 4: 2, 5: 2}
    held = [set(host.states.all()) for host in world.hosts]
    assert set.union(*held) == {0, 1, 2, 3, 4, 5}
    assert sum(map(len, held)) == 6  # nobody is in two places


@pytest.mark.parametrize("how", ["raise", "diverge", "spoil state"])
def test_a_failed_client_is_named_and_its_state_is_as_it_was(how: str, tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    world.train(0, [2])
    before = world.federation.held_states()[2]
    with pytest.raises(ClientError, match="client 2, round 2, local_update"):
        world.train(1, [2], {2: how})
    assert_equal(world.federation.held_states()[2], before)
    assert before["visits"] == 1


def test_a_diverged_client_is_told_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"non-finite.*nothing of it entered the aggregate"):
        World(tmp_path, 1).train(0, [1, 4], {4: "diverge"})


def test_a_procedure_that_is_averaged_must_return_weighted(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    with pytest.raises(ClientError, match="must return Weighted"):
        world.federation.mean(world.algorithm.visits, [0], {})


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_each_group_has_its_own_mean_from_one_pass(hosts: int, tmp_path: Path) -> None:
    world, alone = World(tmp_path / "groups", hosts), World(tmp_path / "alone", 1)
    federation, procedure = world.federation, world.algorithm.update_of_a_group
    federation.begin_round(0)
    means = federation.means(procedure, [0, 1, 2, 3, 4], {"model": world.model})
    sent = num_bytes(world.model)
    assert federation.traffic.by_client == dict.fromkeys(range(5), (sent, sent))
    assert list(means) == ["even", "odd"]
    assert_equal(means["even"], alone.train(0, [0, 2, 4]))
    assert_equal(means["odd"], alone.train(0, [1, 3]))
    assert list(federation.means(procedure, [3], {"model": world.model})) == ["odd"]
    # groups are no concern of a mean over everybody
    everybody = federation.mean(procedure, [1, 2], {"model": world.model})
    assert_equal(everybody, federation.mean(world.algorithm.local_update, [1, 2], {"model": world.model}))


def test_commit_rewind_and_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    federation = world.federation
    world.train(0, [0, 1, 2])
    world.train(1, [2, 3])
    committed = federation.finish_commit(federation.start_commit(2))
    assert set(committed) == {0, 1, 2, 3}
    federation.adopt(committed)
    states = federation.held_states()
    world.train(2, [0, 2, 5])
    federation.rewind()
    assert federation.held_states() == {}
    assert world.visits() == {0: 1, 1: 1, 2: 2, 3: 1, 4: 0, 5: 0}
    assert_equal(federation.held_states(), states)


def test_what_was_given_up_ends_before_its_next_client_and_a_rewind_begins_with_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 1)
    (host,) = world.hosts
    ran, begin = list[int](), host.running.begin

    def given_up_at_client_1(clients: Sequence[int]) -> None:
        ran.extend(clients)
        if 1 in clients:
            host.abandon()  # as another thread of an actor does
        begin(clients)

    monkeypatch.setattr(host.running, "begin", given_up_at_client_1)
    job, model = Job("local_update", "mean", 0, (0, 1, 2, 3)), {"model": to_numpy(world.model)}
    for _ in range(2):  # the second one waited
        found = host.run(job, model)
        assert found.abandoned and not (found.totals or found.stateful or found.seconds)
        assert ran == [0, 1]
    with pytest.raises(AssertionError, match="given up for a rewind"):
        world.train(0, [0, 2])
    monkeypatch.undo()
    world.federation.rewind()
    assert host.states.lookups == Lookups()
    assert world.visits() == dict.fromkeys(range(6), 0)
    world.train(0, [0, 2, 3])
    assert world.visits() == {0: 1, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0}


def test_a_commit_leaves_out_what_the_round_after_it_has_changed(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    federation = world.federation
    world.train(0, [0, 1])
    world.train(1, [1, 2])
    first = federation.finish_commit(federation.start_commit(1))
    assert set(first) == {0, 1}
    federation.adopt(first)
    second = federation.finish_commit(federation.start_commit(2))
    assert set(second) == {1, 2}
    federation.adopt(first)
    federation.rewind()
    assert world.visits() == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}


def test_the_newest_of_two_hosts_states_is_committed(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    federation = world.federation
    for round in range(3):  # client 2 is the largest: with others it moves between the hosts
        world.train(round, [[2], [2, 5, 4, 1], [0, 1, 2, 3, 4, 5]][round])
    federation.adopt(federation.finish_commit(federation.start_commit(3)))
    federation.rewind()
    assert world.visits()[2] == 3


def test_scoring_changes_no_state_and_published_models_are_scored_on_request(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.train(0, [0, 1])
    before = world.federation.held_states()
    scores = world.federation.evaluate({"model": world.model}, ("test",), final=True)
    assert list(scores) == [0, 1, 2, 3, 4, 5]
    assert scores[2]["test"]["global"].n == 30
    assert_equal(world.federation.held_states(), before)


def test_one_host_per_client_never_mixes(tmp_path: Path) -> None:
    world = World(tmp_path, 6)
    federation = Federation(
        Hosts(InlinePool(world.hosts), pinned=True), world.task, world.context, world.dataset.sizes()
    )
    federation.begin_round(0)
    federation.mean(world.algorithm.local_update, [1, 4, 5], {"model": world.model})
    assert [list(host.states.all()) for host in world.hosts] == [[], [1], [], [], [4], [5]]


def test_unknown_states_are_restored_once(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    world.train(0, [3])
    committed = world.federation.finish_commit(world.federation.start_commit(1))
    host = world.hosts[0]
    host.rewind()
    job: dict[str, Any] = {"procedure": "visits", "kind": "map", "round": 1, "clients": (3,), "committed": committed}
    assert host.run(Job(**job), to_numpy({})).values[3]["visits"] == 1
    assert host.run(Job(**(job | {"committed": {}})), to_numpy({})).values[3]["visits"] == 1


def test_an_evaluation_in_pieces_reports_its_progress_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ALGORITHMS["superfed-mm"]
    toy = toy_of(case, hosts=2)
    for cohort in case.cohorts():
        toy.step(cohort)
    expected = toy.scores(final=True)
    monkeypatch.setattr("actors.federation.evaluation.CLIENTS_AT_A_TIME", 1)
    seen: list[tuple[int, int]] = []
    found = toy.federation.evaluate(toy.server, ("test",), True, report=lambda *done: seen.append(done))
    assert seen == [(done, len(SIZES)) for done in range(1, len(SIZES) + 1)]
    assert {client: set(rows["test"]) for client, rows in found.items()} == {c: set(r) for c, r in expected.items()}
    for client, rows in expected.items():
        for row, statistics in rows.items():
            assert (found[client]["test"][row].vector == statistics.vector).all()


def test_update_variance_is_that_of_the_last_layers_changes() -> None:
    case = ALGORITHMS["fedavg"]
    for hosts in (1, 2, 3):
        toy = toy_of(case, hosts=hosts)
        before = toy.server["model"]
        changes = []
        for client in (0, 2, 3):
            alone = toy_of(case)
            alone.step([client])
            model = alone.server["model"]
            changes.append(torch.cat([(model[name] - before[name]).flatten() for name in ("head.weight", "head.bias")]))
        stacked = torch.stack(changes)
        toy.step([0, 2, 3])
        expected = float(((stacked - stacked.mean(0)) ** 2).sum())
        assert toy.federation.updates.variance() == pytest.approx(expected, rel=1e-9)
        toy.step([1])
        assert toy.federation.updates.variance() == pytest.approx(0, abs=1e-20)
