"""Clients that fail: retried, left out of a round, or the end of it; the same for any number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.failures import Failure, RoundUndoneError
from actors.hosting.host import ClientHost
from actors.hosting.state import ClientStates
from actors.processes.pool import InlinePool
from algorithms.base import Averaging, Clients
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.magnitudes import NonFiniteError
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, DataError
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tasks.base import Task
from tests.support.toy_networks import softmax_regression
from tests.support.toys import CPU, assert_equal, random_clients

SKIP = ClientsConfig(on_error="skip")


LEFT: dict[int, int] = {}
"""How often a client fails from now on, by id."""


class Unreliable(Averaging):
    """Counts visits in its state; fails by request, in ``how`` by client."""

    name: Literal["unreliable"] = "unreliable"

    async def visit(self, client: Client, how: str = "well") -> Weighted:
        client.state["visits"] = client.state.get("visits", 0) + 1
        value = torch.tensor([float(client.id), float(client.state["visits"])], dtype=torch.float64)
        if how == "raise":
            raise RuntimeError("no such thing")
        if how == "huge":
            return Weighted({"value": value + 1e12}, 1000)
        if how in ("far", "farther"):
            return Weighted({"value": value + (2e6 if how == "far" else 4e6)}, 1)
        if how == "large":
            return Weighted({"value": value + 3e12}, 1)
        if how == "other shape":
            return Weighted({"value": torch.zeros(3, dtype=torch.float64)}, client.num_samples)
        if how == "spoil":
            client.state["mark"] = torch.tensor([float("inf")])
        if how == "no samples":
            raise DataError("file gone")
        if how == "unweighted":
            return {"value": value}  # type: ignore[return-value]
        result = {"nan": value / 0, "no weight": value}.get(how, value)
        return Weighted(
            {"value": result}, 0 if how == "no weight" else client.num_samples, "odd" if client.id % 2 else ""
        )

    def update(self, trained: Tree, received: Tree, task: Task) -> torch.Tensor:
        change: torch.Tensor = trained["value"]
        return change

    async def look(self, client: Client, how: str = "well") -> Tree:
        if how == "raise":
            raise RuntimeError("no such thing")
        return {"visits": float(client.state.get("visits", 0))}

    async def count_down(self, client: Client) -> Weighted:
        """Fails as often as :data:`LEFT` says; inline hosts share it."""
        client.state["visits"] = client.state.get("visits", 0) + 1
        draw = client.context.streams.generator("test", client.round, client.id).random()
        if LEFT.get(client.id, 0):
            LEFT[client.id] -= 1
            raise MemoryError
        return Weighted({"draw": float(draw)})


class World:
    """Six clients on some hosts with a commit store.

    Attributes:
        splits: scored after each round's training; the variance of updates is then computed.
    """

    def __init__(self, folder: Path, hosts: int, policy: ClientsConfig = SKIP, mode: str = "looped") -> None:
        self.splits: tuple[str, ...] = ()
        dataset = random_clients([5, 9, 30, 4, 12, 20])
        train = TrainConfig(rounds=5, clients_per_round=3, local_epochs=1, batch_size=4, lr=0.1)
        context = RoundContext(0, 5, 6, train, RandomStreams(0))
        self.algorithm, task = Unreliable(), softmax_regression()
        engine = EngineConfig(mode=mode)  # type: ignore[arg-type]
        self.hosts = [
            ClientHost(
                self.algorithm,
                Engine(task, CPU, engine),
                dataset,
                context,
                ClientStates(CommitStore(Storage(str(folder))), number),
                64,
            )
            for number in range(hosts)
        ]
        self.federation = Federation(Hosts(InlinePool(self.hosts)), task, context, dataset.sizes(), policy)

    def play(self, round: int, cohort: list[int], how: dict[int, str], calls: Any = None, **options: Any) -> Tree:
        """A round in which each client visits, and does ``how`` asks for."""

        def one_call(cohort: list[int], clients: Clients) -> Tree:
            payloads = {client: {"how": word} for client, word in how.items()}
            return clients.mean(self.algorithm.visit, cohort, {}, payloads, **options)

        class Playing(Unreliable):
            def round(self, server: Tree, cohort: Any, clients: Clients) -> Tree:
                return (calls or one_call)(cohort, clients)

        self.federation.begin_round(round, self.splits, cohort)
        return self.federation.play(Playing(), {}, cohort)

    def visits(self) -> dict[int, float]:
        self.federation.begin_round(9)  # those absent from the last round are back
        values = self.federation.map(self.algorithm.look, range(6), {})
        return {client: value["visits"] for client, value in values.items()}


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


@pytest.mark.parametrize("how", ["no samples", "unweighted", "other shape"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_what_no_client_is_to_blame_for_ends_the_run_whatever_the_policy(hosts: int, how: str, tmp_path: Path) -> None:
    with pytest.raises((ClientError, ValueError), match=r"file gone|must return Weighted|differ in structure"):
        World(tmp_path, hosts).play(0, [0, 2, 4], {2: how})


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("bad", [0, 4])
def test_values_too_large_for_an_exact_sum_are_blamed_on_who_has_them(hosts: int, bad: int, tmp_path: Path) -> None:
    message = rf"client {bad}, round 1, visit: OverflowError: 'value' holds up to 1e\+12 .* 1000: .* lower train.lr"
    with pytest.raises(ClientError, match=message):
        World(tmp_path, hosts, ClientsConfig()).play(0, [0, 2, 4], {bad: "huge"})


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_sum_that_only_all_together_is_too_large_is_blamed_on_nobody(hosts: int, tmp_path: Path) -> None:
    message = (
        r"^the clients, round 1, visit: .*the sum of \d weighted contributions and more is too large: weighted values"
    )
    with pytest.raises(ClientError, match=message):
        World(tmp_path, hosts, ClientsConfig()).play(0, [0, 1, 2], dict.fromkeys([0, 1, 2], "large"))


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_an_update_whose_squared_norm_has_no_exact_sum_is_blamed_on_who_has_it(
    hosts: int, bad: int, tmp_path: Path
) -> None:
    """Its message would fit: what does not is the sum for the variance of updates (`update_variance`)."""
    own = World(tmp_path, hosts)
    own.splits = ("test",)
    found = own.play(0, [0, 2, 4], {bad: "farther"})
    (failure,) = own.federation.absent.values()
    assert list(own.federation.absent) == [bad]
    assert failure.reason.startswith("OverflowError: its update: 'squared_norm' holds up to 3.2e+13")
    rest = World(tmp_path / "rest", 1)
    rest.splits = ("test",)
    assert_equal(found, rest.play(0, sorted({0, 2, 4} - {bad}), {}))
    assert own.federation.updates.variance() == rest.federation.updates.variance()
    own = World(tmp_path / "fail", hosts, ClientsConfig())
    own.splits = ("test",)
    with pytest.raises(ClientError, match=rf"client {bad}, round 1, visit: OverflowError: its update: 'squared_norm'"):
        own.play(0, [0, 2, 4], {bad: "farther"})


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_updates_that_only_all_together_are_too_large_are_blamed_on_nobody(hosts: int, tmp_path: Path) -> None:
    far = dict.fromkeys([0, 2, 4], "far")
    own = World(tmp_path, hosts, ClientsConfig())
    own.splits = ("test",)
    with pytest.raises(ClientError, match=r"^the clients, round 1, visit: .*the sum of \d weighted contributions and"):
        own.play(0, [0, 2, 4], far)
    own = World(tmp_path / "skip", hosts)
    own.splits = ("test",)
    assert own.play(0, [0, 2, 4], far) == {}
    assert sorted(own.federation.absent) == [0, 2, 4]


def test_without_skipping_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="client 2, round 1, visit: RuntimeError: no such thing"):
        World(tmp_path, 1, ClientsConfig()).play(0, [0, 2], {2: "raise"})


@pytest.mark.parametrize(("required", "cohort"), [(None, [0, 1]), (True, [0, 1, 5])])
def test_a_client_that_is_needed_ends_the_run(required: bool | None, cohort: list[int], tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def everybody(cohort: list[int], clients: Clients) -> Tree:
        return clients.map(world.algorithm.look, range(6), {}, {5: {"how": "raise"}}, required=required)

    with pytest.raises(ClientError, match="client 5, round 4, look: RuntimeError: no such thing; this pass of the"):
        world.play(3, cohort, {}, everybody)


def test_a_client_that_was_not_sampled_may_be_missed_on_request(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def everybody(cohort: list[int], clients: Clients) -> Tree:
        return clients.map(world.algorithm.look, range(6), {}, {5: {"how": "raise"}}, required=False)

    assert list(world.play(0, [0, 1], {}, everybody)) == [0, 1, 2, 3, 4]
    assert world.federation.absent == {5: Failure("look", "RuntimeError: no such thing")}


def test_a_failure_after_the_first_call_undoes_the_round(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def twice(cohort: list[int], clients: Clients) -> Tree:
        clients.mean(world.algorithm.visit, cohort, {})
        return clients.map(world.algorithm.look, cohort, {}, {c: {"how": "raise"} for c in cohort if c == 1})

    with pytest.raises(RoundUndoneError, match="round 5 is done again without clients 1") as undone:
        world.play(4, [0, 1, 2], {}, twice)
    world.federation.rewind()
    world.federation.begin_round(4, (), [0, 1, 2], undone.value.failures)
    assert world.federation.present([0, 1, 2]) == [0, 2]


def test_a_call_that_depends_on_who_is_there_undoes_the_round(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def counted(cohort: list[int], clients: Clients) -> Tree:
        payloads = {client: {"how": "raise" if client == 1 else f"well, {len(cohort)}"} for client in cohort}
        return clients.mean(world.algorithm.visit, cohort, {}, payloads)

    with pytest.raises(RoundUndoneError):
        world.play(0, [0, 1, 2], {}, counted)


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
