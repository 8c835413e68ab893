"""Variance of updates, counted messages, and the pooled client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.processes.pool import InlinePool
from algorithms.clients import Call, Clients, Replies
from algorithms.floco import Floco
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.cases.base import Case
from tests.support.counting import Counting, World
from tests.support.toys import assert_equal


def test_golden_update_variance() -> None:
    toy = toy_of(ALGORITHMS["fedavg"])
    assert toy.federation.updates.variance() is None
    for change in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        point = torch.tensor(change, dtype=torch.float64)
        part = ExactSum()
        part.add(Weighted({"change": point, "squared_norm": point @ point}, 1))
        toy.federation.updates.add(part, 0, "local_update")
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


def test_what_clients_can_make_counts_as_what_they_make_it_from(tmp_path: Path) -> None:
    """A method says how many bytes they are sent; one that says nothing sends its tensors."""
    federation, procedure = World(tmp_path, 2).federation, Counting().visits
    federation.begin_round(0)
    federation.map(procedure, [1, 4], {}, down={1: 5, 4: 0})
    federation.map(procedure, [4], {}, down={4: 7, 1: 100})
    assert federation.traffic.by_client == {1: (5, 8), 4: (7, 16)}
    toy = toy_of(ALGORITHMS["fedavg"])
    toy.federation.begin_round(0, ("test",))
    model, size = toy.server["model"], 8 * toy.task.network.num_parameters
    toy.federation.mean(toy.algorithm.local_update, [0, 2], {"model": model}, down={0: 1, 2: 2})
    assert toy.federation.traffic.by_client == {0: (1, size), 2: (2, size)}


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
    """What answers calls answers all four ways, and is told the same: who is asked, what counts, who may be missed."""
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
    alone = clients.each(update, [2, 0], sent, required=False)
    assert list(alone) == [0, 2] and alone[2].weight == 30
    assert_equal(alone[2].tree, world.federation.mean(update, [2], sent))
    assert list(clients.map(world.algorithm.visits, [3, 1], {}, counted=False)) == [1, 3]
    assert [(call.kind, call.clients, call.counted, call.required) for call in clients.calls] == [
        ("mean", (2, 0), True, None),
        ("mean", (1, 2), True, True),
        ("each", (2, 0), True, False),
        ("map", (3, 1), False, None),
    ]
    assert clients.pooled == 6
    assert clients.num_samples([2, 6]).tolist() == [30, 80]
