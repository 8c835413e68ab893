"""Assignment, moving states between hosts, commits and rewinds, with hosts in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.job import Job
from actors.hosting.state import ClientStates
from actors.processes.pool import InlinePool
from algorithms.base import Averaging
from algorithms.clients import Call, Clients, Replies
from algorithms.floco import Floco
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.engine.classification import Classification
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.settings import TrainConfig
from rayfl.errors import ClientError
from rayfl.examples import InputSpec
from rayfl.models.perceptron import TwoNN
from rayfl.params import Tree, num_bytes, to_numpy
from rayfl.randomness import RandomStreams
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.cases import ALGORITHMS, SIZES, Case, toy_of
from tests.support.toys import CPU, assert_equal, random_clients, softmax_regression


class Counting(Averaging):
    """Counts a client's visits in its state; misbehaves on request."""

    name: Literal["counting"] = "counting"

    async def local_update(self, client: Client, model: Tree, how: str = "well") -> Weighted:
        client.state["visits"] = client.state.get("visits", 0) + 1
        client.state["mark"] = torch.full((2,), float(client.id))
        if how == "raise":
            raise RuntimeError("no such thing")
        if how == "diverge":
            return Weighted({name: value / 0 for name, value in model.items()}, client.num_samples)
        if how == "spoil state":
            client.state["mark"] = torch.tensor([float("nan")])
        trained = await client.train(model, self.objective)
        return self.weighted(client, trained)

    async def samples(self, client: Client) -> Tree:
        part = client.examples()
        return {"n": float(client.num_samples), "x": part.x, "y": part.y.double()}

    async def update_of_a_group(self, client: Client, model: Tree) -> Weighted:
        contribution = await self.local_update(client, model)
        return replace(contribution, group="odd" if client.id % 2 else "even")

    async def visits(self, client: Client) -> Tree:
        return {"visits": float(client.state.get("visits", 0))}


class World:
    """Six clients on some hosts with a commit store."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.dataset = random_clients([5, 9, 30, 4, 12, 20])
        self.task = softmax_regression()
        train = TrainConfig(rounds=5, clients_per_round=3, local_epochs=1, batch_size=4, lr=0.1)
        self.context = RoundContext(0, 5, 6, train, RandomStreams(0))
        self.algorithm = Counting()
        store = CommitStore(Storage(str(folder)))
        self.hosts = [
            ClientHost(
                self.algorithm,
                Engine(self.task, CPU, EngineConfig()),
                self.dataset,
                self.context,
                ClientStates(store, number),
                64,
            )
            for number in range(hosts)
        ]
        self.federation = Federation(Hosts(InlinePool(self.hosts)), self.task, self.context, self.dataset.sizes())
        self.model = self.task.network.initialize(0)

    def train(self, round: int, cohort: list[int], how: dict[int, str] | None = None) -> Tree:
        self.federation.begin_round(round)
        payloads = {client: {"how": word} for client, word in (how or {}).items()}
        return self.federation.mean(self.algorithm.local_update, cohort, {"model": self.model}, payloads)

    def visits(self) -> dict[int, float]:
        values = self.federation.map(self.algorithm.visits, range(6), {})
        return {client: value["visits"] for client, value in values.items()}


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
    with pytest.raises(ClientError, match="client 2, round 1, local_update"):
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
    monkeypatch.setattr("actors.federation.evaluation._AT_A_TIME", 1)
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


def test_golden_update_variance() -> None:
    toy = toy_of(ALGORITHMS["fedavg"])
    assert toy.federation.updates.variance() is None
    for change in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        point = torch.tensor(change, dtype=torch.float64)
        part = ExactSum()
        part.add(Weighted({"change": point, "squared_norm": point @ point}, 1))
        toy.federation.updates.add(part)
    assert toy.federation.updates.variance() == pytest.approx(4 / 3, abs=1e-12)


def test_messages_are_counted_by_client_and_the_cohort_may_be_scored_on_what_it_receives_next() -> None:
    case = ALGORITHMS["fedphp"]
    toy = toy_of(case)
    toy.step([0, 2])
    size = 8 * toy.task.network.num_parameters
    assert toy.federation.traffic.by_client == {0: (size, size), 2: (size, size)}
    assert set(toy.federation.evaluate(toy.server, ("test",), False, clients=[0, 2])) == {0, 2}


def test_work_that_a_deployment_does_on_the_server_is_no_traffic(tmp_path: Path) -> None:
    federation, procedure = World(tmp_path, 2).federation, Counting().visits
    federation.begin_round(0)
    assert federation.map(procedure, [1, 4], {}, counted=False) == {1: {"visits": 0}, 4: {"visits": 0}}
    assert federation.traffic.by_client == {}
    federation.map(procedure, [1, 4], {})
    assert federation.traffic.by_client == {1: (0, 8), 4: (0, 8)}


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_the_pooled_client_owns_everybodys_samples(hosts: int, tmp_path: Path) -> None:
    world = World(tmp_path, hosts)
    federation = world.federation
    parts = [world.dataset.load(client)["train"] for client in range(6)]
    assert federation.pooled == 6
    assert federation.num_samples([2, 6, 0]).tolist() == [30, 80, 5]
    found = federation.map(world.algorithm.samples, [1, federation.pooled], {})
    assert (found[1]["n"], found[6]["n"]) == (9, 80)
    assert torch.equal(found[6]["x"], torch.cat([part.x for part in parts]))
    assert torch.equal(found[6]["y"], torch.cat([part.y for part in parts]).double())


def test_the_pooled_client_is_trained_and_has_a_state_like_any_other(tmp_path: Path) -> None:
    world, alone = World(tmp_path / "some", 3), World(tmp_path / "one", 1)
    federation = world.federation
    for round, cohort in enumerate(([6], [0, 2, 6], [1, 6], [2, 6])):
        assert_equal(world.train(round, cohort), alone.train(round, cohort))
    committed = federation.finish_commit(federation.start_commit(4))
    assert set(committed) == {0, 1, 2, 6}
    federation.adopt(committed)
    federation.rewind()
    assert federation.map(world.algorithm.visits, [6], {}) == {6: {"visits": 4}}
    held = [client for host in world.hosts for client in host.states.all()]
    assert held == [6]


def test_the_pooled_client_is_never_evaluated(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.train(0, [6])
    assert list(world.federation.evaluate({"model": world.model}, ("test",), final=True)) == [0, 1, 2, 3, 4, 5]


def test_with_one_host_per_client_the_pooled_client_is_the_guest_of_the_first(tmp_path: Path) -> None:
    world, shared = World(tmp_path / "pinned", 6), World(tmp_path / "shared", 2)
    federation = Federation(
        Hosts(InlinePool(world.hosts), pinned=True), world.task, world.context, world.dataset.sizes()
    )
    federation.begin_round(0)
    mean = federation.mean(world.algorithm.local_update, [0, 3, 6], {"model": world.model})
    assert [list(host.states.all()) for host in world.hosts] == [[0, 6], [], [], [3], [], []]
    assert_equal(mean, shared.train(0, [0, 3, 6]))
    assert federation.map(world.algorithm.visits, [6], {}) == {6: {"visits": 1}}


def test_a_simplex_of_one_endpoint_has_the_update_variance_of_federated_averaging() -> None:
    """Of a last layer without bias: endpoints are weights alone."""
    task = Classification(TwoNN(hidden=(7,), bias=False).network(InputSpec("image", (5,), 3)))
    average, point, simplex = (
        toy_of(case, double=False, task=task)
        for case in (
            ALGORITHMS["fedavg"],
            Case(Floco(simplex_dimension=0, assignment_round=0)),
            Case(Floco(simplex_dimension=2, assignment_round=9)),
        )
    )
    for cohort in ([0, 2, 3], [1, 2]):
        for toy in (average, point, simplex):
            toy.step(cohort)
        assert point.federation.updates.variance() == average.federation.updates.variance()
        assert 0 < simplex.federation.updates.variance() < average.federation.updates.variance()


def test_each_way_of_asking_is_one_call(tmp_path: Path) -> None:
    """What answers calls answers all three ways, and is told the same: who is asked, what counts, who may be missed."""
    world = World(tmp_path, 2)

    class Noting(Clients):
        def __init__(self) -> None:
            super().__init__(world.federation.task, world.context, world.dataset.sizes()[:, 0])
            self.calls: list[Call] = []

        def on_server(self, procedure: Any, given: Tree) -> Tree:
            return world.federation.on_server(procedure, given)

        def call(self, call: Call) -> Replies:
            self.calls.append(call)
            return world.federation.call(call)

    clients, update, sent = Noting(), world.algorithm.local_update, {"model": world.model}
    assert_equal(clients.mean(update, [2, 0], sent), world.federation.mean(update, [2, 0], sent))
    groups = clients.means(world.algorithm.update_of_a_group, [1, 2], sent, required=True)
    assert_equal(groups["odd"], world.federation.mean(update, [1], sent))
    assert list(clients.map(world.algorithm.visits, [3, 1], {}, counted=False)) == [1, 3]
    assert [(call.kind, call.clients, call.counted, call.required) for call in clients.calls] == [
        ("mean", (2, 0), True, None),
        ("mean", (1, 2), True, True),
        ("map", (3, 1), False, None),
    ]
    assert clients.pooled == 6
    assert clients.num_samples([2, 6]).tolist() == [30, 80]
