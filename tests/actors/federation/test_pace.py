"""What clients and hosts take is learned, and clients are shared out by it; results do not depend on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.federation.pace import Pace
from actors.hosting.host import ClientHost
from actors.hosting.job import Job, JobResult
from actors.processes.pool import InlinePool
from algorithms.registry import Experiment
from cluster.planning.balance import hosts_of
from rayfl.params import Tree
from tests.support.counting import World
from tests.support.experiments import small_experiment
from tests.support.toys import assert_equal

COSTS = dict.fromkeys(range(40), 10.0)


def learned(
    work: dict[int, float], slowness: list[float], noise: float, rounds: int = 40, before: Pace | None = None
) -> Pace:
    """After rounds in which each host had a random part of the clients."""
    pace, generator = before or Pace(), np.random.default_rng(3)
    for _ in range(rounds):
        for host, share in enumerate(np.array_split(generator.permutation(list(work)), len(slowness))):
            taken = {int(k): work[k] * slowness[host] * np.exp(noise * generator.standard_normal()) for k in share}
            pace.observe("train", host, COSTS, taken)
    return pace


def test_the_slowness_of_hosts_is_found() -> None:
    pace = learned(dict.fromkeys(COSTS, 0.2), [1.0, 3.0, 0.5], noise=0.1)
    one, two, three = pace.slowness(3)
    assert two / one == pytest.approx(3, rel=0.15)
    assert three / one == pytest.approx(0.5, rel=0.15)
    assert pace.slowness(4)[3] == 1


def test_the_work_of_clients_is_found_whatever_their_costs_say() -> None:
    work = {client: 0.1 if client % 4 else 0.5 for client in COSTS}
    pace = learned(work, [1.0, 2.0], noise=0.1)
    found = pace.work("train", COSTS)
    mean = np.mean([found[client] for client in found if client % 4])
    assert np.mean([found[client] for client in found if not client % 4]) / mean == pytest.approx(5, rel=0.2)


@pytest.mark.parametrize(("slow", "alike"), [(1.4, True), (1.8, False)])
def test_hosts_within_a_quarter_of_their_mean_are_alike(slow: float, alike: bool) -> None:
    """The mean of 1 and 1.4 is 1.18, of 1 and 1.8 it is 1.34."""
    found = learned(dict.fromkeys(COSTS, 0.2), [1.0, slow], noise=0.0).slowness(2)
    assert (found == [1, 1]) == alike


def test_of_a_client_that_is_new_its_cost_is_taken_at_the_rate_of_the_others() -> None:
    pace = learned(dict.fromkeys(COSTS, 0.2), [1.0, 1.0], noise=0.0)
    found = pace.work("train", {0: 10.0, 100: 30.0})
    assert found[100] / found[0] == pytest.approx(3, rel=1e-6)
    assert pace.work("evaluate", {0: 10.0, 100: 30.0}) == {0: 10.0, 100: 30.0}


def test_a_host_that_has_become_slower_is_noticed() -> None:
    alike = learned(dict.fromkeys(COSTS, 0.2), [1.0, 1.0], noise=0.0)
    pace = learned(dict.fromkeys(COSTS, 0.2), [1.0, 3.0], noise=0.0, rounds=15, before=alike)
    one, two = pace.slowness(2)
    assert two / one == pytest.approx(3, rel=0.1)


def test_the_first_share_of_a_host_does_not_count() -> None:
    pace = Pace()
    for host, seconds in enumerate((9.0, 0.1)):
        pace.observe("train", host, COSTS, dict.fromkeys(range(5), seconds))
    assert pace.slowness(2) == [1, 1]
    assert pace.work("train", COSTS) == COSTS


def test_after_hosts_were_replaced_clients_alone_are_known() -> None:
    pace = learned({client: 0.1 if client % 4 else 0.5 for client in COSTS}, [1.0, 3.0], noise=0.0)
    work = pace.work("train", COSTS)
    assert pace.slowness(2)[1] > 1.5
    pace.forget_hosts()
    assert pace.slowness(2) == [1, 1]
    assert pace.work("train", COSTS) == work
    pace.observe("train", 1, COSTS, {0: 50.0})
    assert pace.slowness(2) == [1, 1]


@pytest.mark.parametrize("seconds", [{}, {0: 0.0}])
def test_nothing_is_learned_of_shares_without_time(seconds: dict[int, float]) -> None:
    pace = Pace()
    for _ in range(3):
        pace.observe("train", 0, COSTS, seconds)
    assert pace.slowness(1) == [1]


class Late(ClientHost):
    """Takes ten times as long as it does, without taking it."""

    def run(self, job: Job, broadcast: Tree, *incoming: Any) -> JobResult:
        result = super().run(job, broadcast, *incoming)
        result.seconds = {client: 10 * seconds for client, seconds in result.seconds.items()}
        return result


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later whenever it is looked at."""

    def clock() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1

    times = clock()
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))


@pytest.mark.usefixtures("ticks")
def test_hosts_share_clients_by_what_they_took_if_it_was_measured(tmp_path: Path) -> None:
    shares, models = {}, {}
    for measured in (False, True):
        world = World(tmp_path / str(measured), 2)
        world.hosts[0].__class__ = Late
        hosts = Hosts(InlinePool(world.hosts), measured=measured)
        world.federation = Federation(hosts, world.task, world.context, world.dataset.sizes())
        for round in range(12):
            models[measured] = world.train(round, [0, 1, 2, 3, 4, 5])
        shares[measured] = [set(host.states.all()) for host in world.hosts]
        assert world.visits() == dict.fromkeys(range(6), 12)
    assert all(len(share) >= 2 for share in shares[False])
    assert shares[True][0] == set()  # one client there would take longer than all six on the other
    assert_equal(*models.values())


def description(**what: Any) -> dict[str, Any]:
    return {"vectorized": False, "device_name": "cpu", "instructions": "AVX2", **what}


@pytest.mark.parametrize(
    ("content", "hosts", "measured"),
    [
        ({}, [{}, {}], True),
        ({}, [{}, {"vectorized": True}], False),
        ({}, [{}, {"instructions": "AVX512"}], False),
        ({}, [{"device_name": "A100"}, {"device_name": "A100", "instructions": "AVX512"}], True),
        ({}, [{"device_name": "A100"}, {"device_name": "T4"}], False),
        ({"cluster": {"balance": "measured"}}, [{}, {"instructions": "AVX512"}], True),
        ({"cluster": {"balance": "sizes"}}, [{}, {}], False),
        ({"cluster": {"balance": "measured"}}, [{"vectorized": True}], True),
    ],
)
def test_automatically_it_is_measured_where_no_result_depends_on_it(
    content: dict[str, Any], hosts: list[dict[str, Any]], measured: bool, tmp_path: Path
) -> None:
    config = Experiment.model_validate(small_experiment(tmp_path, "run", "fedavg") | content)
    found = hosts_of(InlinePool([]), config, [description(**host) for host in hosts])
    assert (found._pace is not None) == measured


@pytest.mark.parametrize("balance", ["auto", "measured"])
@pytest.mark.parametrize("vectorized", [True, False])
def test_that_unlike_devices_get_equal_work_is_said(
    balance: str, vectorized: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Experiment.model_validate(small_experiment(tmp_path, "run", "fedavg") | {"cluster": {"balance": balance}})
    gpus = [description(vectorized=vectorized, device_name=name) for name in ("A100", "T4", "T4")]
    with caplog.at_level(logging.WARNING, "rayfl"):
        hosts_of(InlinePool([]), config, gpus)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (balance == "auto")
    assert all("A100, T4" in text and "cluster.balance=measured" in text for text in said)
