"""Hosts of one machine merge their sums before the driver receives them; results keep their bits."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.federation import merging
from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.job import JobResult
from actors.hosting.sums import LEAST_BYTES, PartialSums, take_sums
from actors.processes.pool import HostDiedError, InlinePool
from algorithms.fedavg import FedAvg
from algorithms.scaffold import Scaffold
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import MethodError
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_equal, random_clients

MACHINES = ("one", "one", "other", "one", "other", "alone")


class Machines(InlinePool):
    """Hosts in this process that stand for processes of several machines.

    Attributes:
        least: bytes of sums that are merged.
        dies_with: the piece that a host does not send any more.
        messages: what the driver received, by kind.
    """

    least = 0
    dies_with: int | None = None

    def __init__(self, hosts: list[Any]) -> None:
        super().__init__(hosts)
        self.messages: Counter[str] = Counter()

    @property
    def home(self) -> str | None:
        return "one"

    def machine(self, host: int) -> str | None:
        return MACHINES[host]

    def submit(self, host: int, method: str, *args: Any) -> Any:
        done = super().submit(host, method, *args)
        if method == "part":
            assert MACHINES[host] != self.home
            if self.messages["pieces"] == self.dies_with:
                self.dies_with = None
                raise HostDiedError(host, "gone")
            done.value = pickle.loads(pickle.dumps(done.value))
            self.messages["pieces" if done.value.piece else "heads"] += 1
        else:
            self.messages["sums with a result"] += isinstance(done.value, JobResult) and bool(done.value.totals)
        return done

    def submit_apart(self, host: int, method: str, *args: Any) -> tuple[Any, Any]:
        self.messages[method] += 1
        if method == "run_apart":
            own, least = self.hosts[host], self.least
            self.hosts[host] = _WithLeast(own, least)  # type: ignore[call-overload]
            try:
                return super().submit_apart(host, method, *args)
            finally:
                self.hosts[host] = own
        return super().submit_apart(host, method, *args)

    def fetch(self, host: int, handle: Any) -> Any:
        self.messages["fetched"] += 1
        return super().fetch(host, handle)


class _WithLeast:
    def __init__(self, host: Any, least: int) -> None:
        self._host, self._least = host, least

    def run_apart(self, *args: Any) -> Any:
        return self._host.run_apart(*args, least=self._least)


def toy(method: Any, hosts: int) -> Toy:
    train = TrainConfig(rounds=3, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    return Toy(method, random_clients([17, 3, 12, 9, 8, 11, 5, 6, 14, 4, 7, 10], seed=1), two_layers(), train, hosts)


def on_machines(own: Toy, policy: ClientsConfig | None = None) -> Machines:
    """Spreads an experiment over the machines."""
    pool = Machines(own.client_hosts)
    own.federation = Federation(Hosts(pool), own.task, own.context, own.dataset.sizes(), policy)
    return pool


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()])
def test_one_sum_a_machine_reaches_the_driver_with_the_same_bits(method: Any) -> None:
    expected, own = toy(method, 1), toy(method, len(MACHINES))
    pool = on_machines(own)
    expected.run()
    own.run()
    assert_equal(own.server, expected.server)
    assert_equal({str(k): v for k, v in own.states().items()}, {str(k): v for k, v in expected.states().items()})
    # A sum of the driver's own machine is read where it lies; those of the two others come in pieces.
    calls = pool.messages["fetched"]
    assert calls >= 3
    assert not pool.messages["sums with a result"]
    assert pool.messages["heads"] == 2 * calls
    assert pool.messages["pieces"] >= 2 * calls
    assert pool.messages["run_apart"] == 6 * calls
    assert pool.messages["merged"] == 3 * calls


@pytest.mark.parametrize("size", [160, 1600, 1 << 20])
def test_a_sum_comes_in_as_many_pieces_as_it_has_bytes_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "PIECE_BYTES", size)
    expected, own = toy(FedAvg(), 1), toy(FedAvg(), len(MACHINES))
    pool = on_machines(own)
    expected.step()
    own.federation.begin_round(0, ())
    own.server = {**own.server, **own.algorithm.round(own.server, list(range(12)), own.federation)}
    assert_equal(own.server, expected.server)
    numbers = sum(leaf.numel() for leaf in own.server["model"].values())
    assert pool.messages["pieces"] == 2 * -(-numbers // (size // 16))


def test_a_host_that_dies_between_pieces_leaves_nothing_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is undone and repeated: what had been added belongs to no later sum."""
    monkeypatch.setattr(merging, "PIECE_BYTES", 160)
    expected, own = toy(FedAvg(), 1), toy(FedAvg(), len(MACHINES))
    pool = on_machines(own)
    expected.step()
    pool.dies_with = 3
    with pytest.raises(HostDiedError, match=r"gone \(it had the sums of local_update in round 1\)"):
        own.step()
    own.federation.rewind()
    own.step()
    assert_equal(own.server, expected.server)


def test_sums_that_are_small_come_with_the_results() -> None:
    expected, own = toy(FedAvg(), 1), toy(FedAvg(), len(MACHINES))
    pool = on_machines(own)
    pool.least = LEAST_BYTES
    expected.run()
    own.run()
    assert_equal(own.server, expected.server)
    assert not pool.messages["fetched"]
    assert not pool.messages["merged"]


def test_the_variance_of_updates_is_that_of_unmerged_sums() -> None:
    found = []
    for hosts in (1, len(MACHINES)):
        own = toy(FedAvg(), hosts)
        if hosts > 1:
            on_machines(own)
        own.step()
        found.append(own.federation.updates.variance())
    assert found[0] == found[1] > 0


class Unlike(FedAvg):
    """A method whose clients 2 and up add an entry of their own."""

    name: str = "unlike"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        result = await super().local_update(client, model)
        return result if client.id < 2 else replace(result, tree={**result.tree, "more": torch.ones(3)})


def test_sums_that_do_not_fit_together_are_refused_as_by_the_driver() -> None:
    own = toy(Unlike(), len(MACHINES))
    on_machines(own)
    with pytest.raises(
        MethodError, match=r"round 1, local_update: contributions differ in structure.*must return tensors"
    ):
        own.step()


@pytest.mark.parametrize("hosts", [1, 3])
def test_unlike_contributions_are_the_methods_on_any_number_of_hosts(hosts: int) -> None:
    with pytest.raises(MethodError, match=r"^round 1, local_update: contributions differ in structure.*\['more'\]"):
        toy(Unlike(), hosts).step()


def test_clients_that_fail_are_left_out_of_merged_sums() -> None:
    class Failing(FedAvg):
        name: str = "failing"

        async def local_update(self, client: Client, model: Tree) -> Weighted:
            if client.id == 4:
                raise ArithmeticError("made up")
            return await super().local_update(client, model)

    expected, own = toy(FedAvg(), 1), toy(Failing(), len(MACHINES))
    on_machines(own, ClientsConfig(on_error="skip"))
    everyone = list(range(12))
    expected.step([client for client in everyone if client != 4])
    own.federation.begin_round(0, (), everyone)
    changed = own.federation.play(own.algorithm, own.server, everyone)
    assert_equal(changed, {name: expected.server[name] for name in changed})
    assert list(own.federation.absent) == [4]


def test_what_sums_weigh_on_their_way() -> None:
    one, many = ExactSum(), ExactSum()
    tree = {"a": torch.ones(1000), "b": 2.0}
    one.add(Weighted(tree, 3))
    for _ in range(3):
        many.add(Weighted(tree, 3))
    assert PartialSums({"": one}).nbytes == 4008
    assert PartialSums({"": many}).nbytes == 16 * 1001
    result = JobResult(totals={"": many})
    assert take_sums(result, 20_000) is None
    assert not result.apart
    sums = take_sums(result, 16_000)
    assert sums is not None
    assert result.apart
    assert not result.totals
    assert_equal(sums.totals[""].mean(), tree)
