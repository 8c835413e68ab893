"""Clients that fail: retried, left out of a round, or the end of it; the same for any number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.hosting.failures import Failure
from algorithms.base import Averaging, Clients
from rayfl.aggregation.magnitudes import NonFiniteError
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.errors import ClientError
from rayfl.params import Tree
from tests.support.toy_networks import softmax_regression
from tests.support.toys import assert_equal
from tests.support.unreliable import LEFT, World


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("how", ["raise", "nan", "spoil", "huge", "no weight"])
def test_a_client_that_fails_leaves_no_trace(how: str, mode: str, hosts: int, tmp_path: Path) -> None:
    world, without = World(tmp_path / "a", hosts, mode=mode), World(tmp_path / "b", 1)
    for round, bad in enumerate(([1], [0, 2], [])):
        found = world.play(round, [0, 1, 2, 4], dict.fromkeys(bad, how))
        rest = [client for client in (0, 1, 2, 4) if client not in bad]
        assert_equal(found, without.play(round, rest, {}))
        assert sorted(world.federation.absent) == bad
        assert world.federation.present([0, 1, 2, 4]) == rest
        assert world.federation.traffic == without.federation.traffic
    assert world.visits() == without.visits() == {0: 2, 1: 2, 2: 2, 3: 0, 4: 3, 5: 0}


@pytest.mark.parametrize("hosts", [1, 3])
def test_if_nobody_is_left_nothing_changes(hosts: int, tmp_path: Path) -> None:
    world = World(tmp_path, hosts)
    assert world.play(0, [1, 2, 3], dict.fromkeys([1, 2, 3], "raise")) == {}
    assert sorted(world.federation.absent) == [1, 2, 3]
    assert world.visits() == dict.fromkeys(range(6), 0)


@pytest.mark.parametrize("hosts", [1, 3])
def test_groups_and_maps_are_of_the_rest(hosts: int, tmp_path: Path) -> None:
    world = World(tmp_path, hosts)

    def means(cohort: list[int], clients: Clients) -> Tree:
        payloads = {1: {"how": "raise"}, 2: {"how": "nan"}}
        return clients.means(world.algorithm.visit, cohort, {}, {c: p for c, p in payloads.items() if c in cohort})

    found = world.play(0, [0, 1, 2, 3], {}, means)
    assert {group: tree["value"].tolist() for group, tree in found.items()} == {"": [0, 1], "odd": [3, 1]}

    def looks(cohort: list[int], clients: Clients) -> Tree:
        return clients.map(world.algorithm.look, cohort, {}, {c: {"how": "raise"} for c in cohort if c == 3})

    assert world.play(1, [0, 1, 3], {}, looks) == {0: {"visits": 1}, 1: {"visits": 0}}


def test_without_skipping_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="client 2, round 1, visit: RuntimeError: no such thing"):
        World(tmp_path, 1, ClientsConfig()).play(0, [0, 2], {2: "raise"})


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_retry_draws_the_same_and_counts_once(hosts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = ClientsConfig(on_error="retry", retries=2, after_retries="skip")
    world, calm = World(tmp_path / "a", hosts, policy), World(tmp_path / "b", 1)

    def draws(cohort: list[int], clients: Clients) -> Tree:
        return clients.mean(world.algorithm.count_down, cohort, {})

    calmly = calm.play(0, [0, 1, 2], {}, draws)
    LEFT.update({1: 2})
    assert_equal(world.play(0, [0, 1, 2], {}, draws), calmly)
    assert world.federation.absent == {}
    assert "client 1, round 1, count_down: failed 2 times, then succeeded" in caplog.text
    assert world.visits() == calm.visits()
    without = calm.play(1, [0, 2], {}, draws)
    LEFT.update({1: 3})
    assert_equal(world.play(1, [0, 1, 2], {}, draws), without)
    assert world.federation.absent == {1: Failure("count_down", "MemoryError")}
    LEFT.update({1: 3})
    with pytest.raises(ClientError, match="client 1, round 1, count_down: MemoryError"):
        World(tmp_path / "c", hosts, ClientsConfig(on_error="retry", retries=2)).play(0, [0, 1, 2], {}, draws)


def test_an_evaluation_goes_on_without_those_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"model": softmax_regression().network.initialize(0)}
    predictors = Averaging.predictors

    async def failing(self: Averaging, client: Client, server: Tree) -> Any:
        if client.id in (2, 3):
            raise NonFiniteError("w")
        return await predictors(self, client, server)

    monkeypatch.setattr(Averaging, "predictors", failing)
    for hosts in (1, 3):
        federation = World(tmp_path, hosts).federation
        seen: list[tuple[int, int]] = []
        scores = federation.evaluate(model, ("test",), False, report=lambda *done, seen=seen: seen.append(done))
        assert list(scores) == [0, 1, 4, 5]
        assert seen[-1] == (6, 6)
        assert federation.unscored == {c: Failure("predictors", "non-finite values in 'w'") for c in (2, 3)}
    with pytest.raises(ClientError, match="client 2, round 1, predictors"):
        World(tmp_path, 1, ClientsConfig()).federation.evaluate(model, ("test",), False)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["well", "raise", "nan", "huge"]), min_size=6, max_size=6), st.integers(1, 4))
def test_any_pattern_of_failures_gives_what_the_others_alone_give(
    tmp_path_factory: pytest.TempPathFactory, how: list[str], hosts: int
) -> None:
    folder = tmp_path_factory.mktemp("world")
    world, alone = World(folder / "a", hosts), World(folder / "b", 1)
    rest = [client for client in range(6) if how[client] == "well"]
    found = world.play(0, list(range(6)), dict(enumerate(how)))
    assert_equal(found, alone.play(0, rest, {}))
    assert world.visits() == alone.visits()
