"""Tensors that several clients are sent: shipped once to a host, one tensor there, counted for each client."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import pytest
import torch

from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.job import Job, JobResult
from actors.processes.pool import InlinePool
from algorithms.base import Algorithm, Clients
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError
from rayfl.params import Tree, from_numpy, num_bytes, to_numpy
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

TRAIN = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=4, lr=0.1)
GIVEN = {0: ("a", "b"), 1: ("b",), 2: ("a",), 3: ("c",)}
WHERE: dict[int, dict[str, int]] = {}
"""Where in memory each client found the models."""


class Exchanging(Algorithm):
    """Sends some of three models to each client."""

    name: str = "exchanging"
    guilty: int = -1

    def init(self, task: Any, context: Any) -> Tree:
        return {"models": {key: task.network.initialize(number) for number, key in enumerate("abc")}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        payloads = {i: {"peers": {key: server["models"][key] for key in GIVEN[i]}} for i in cohort}
        clients.map(self.look, cohort, {}, payloads)
        return {}

    async def look(self, client: Client, peers: Tree) -> Tree:
        """Notes where the models are."""
        WHERE[client.id] = {key: model["head.bias"].data_ptr() for key, model in peers.items()}
        if client.id == self.guilty:
            next(iter(peers.values()))["head.bias"].zero_()
        return {}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    seen: list[Job] = []
    run = ClientHost.run

    def recording(self: ClientHost, job: Job, broadcast: Tree, *incoming: Any) -> JobResult:
        # as it would arrive in another process
        seen.append(job)
        return run(self, pickle.loads(pickle.dumps(job)), broadcast, *incoming)

    monkeypatch.setattr(ClientHost, "run", recording)
    return seen


def toy_of(hosts: int = 1, guilty: int = -1) -> Toy:
    WHERE.clear()
    algorithm = Exchanging(guilty=guilty)
    return Toy(algorithm, random_clients((8, 8, 8, 8)), two_layers(hidden=500), TRAIN, hosts, "vectorized")


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tensor_of_several_payloads_travels_once_to_each_host(hosts: int, jobs: list[Job]) -> None:
    toy = toy_of(hosts)
    toy.step()
    size = num_bytes(toy.server["models"]["a"])
    assert len(jobs) == hosts
    for job in jobs:
        wanted = {key for client in job.clients for key in GIVEN[client]}
        assert len(wanted) * size < len(pickle.dumps(job)) < (len(wanted) + 0.2) * size
    for client, keys in GIVEN.items():
        assert toy.federation.traffic.by_client[client] == (len(keys) * size, 0)


def test_clients_at_work_together_find_it_in_one_place(jobs: list[Job]) -> None:
    toy_of().step()
    assert WHERE[0]["a"] == WHERE[2]["a"]
    assert WHERE[0]["b"] == WHERE[1]["b"]
    assert len({place for found in WHERE.values() for place in found.values()}) == 3


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_nobody_may_write_to_it(guilty: int, jobs: list[Job]) -> None:
    toy = toy_of(guilty=guilty)
    named = rf"client {guilty}, .*'peers/./head\.bias' of what is sent to several clients"
    with pytest.raises(ClientError, match=named):
        toy.step()


def test_what_one_client_alone_is_sent_is_its_own(jobs: list[Job]) -> None:
    toy_of(guilty=3).step()


class Counted(InlinePool):
    """Counts the pieces that each host has been given and has not answered yet."""

    def __init__(self, hosts: list[ClientHost]) -> None:
        super().__init__(hosts)
        self.most: Counter[int] = Counter()
        self._given: Counter[int] = Counter()

    def submit(self, host: int, method: str, *args: Any) -> Any:
        self._given[host] += method == "run"
        self.most[host] = max(self.most[host], self._given[host])
        return super().submit(host, method, *args)

    def collect(
        self, handles: MutableMapping[Any, int], deadline_s: float | None = None, of_clients: bool = False
    ) -> Iterator[tuple[int, Any]]:
        for host, result in super().collect(handles, deadline_s, of_clients):
            self._given[host] -= 1
            yield host, result


@pytest.mark.parametrize("with_payloads", [True, False])
def test_of_a_share_in_pieces_few_are_under_way(with_payloads: bool) -> None:
    """Payloads of all clients would be copied into Ray's object store, and nothing be heard of an evaluation inline."""
    clients = range(20)
    toy = Toy(Exchanging(), random_clients([8] * 20), two_layers(hidden=5), TRAIN, 2)
    models = toy.server["models"]
    payloads = {i: {"peers": {key: models[key] for key in GIVEN[i % 4]}} for i in clients} if with_payloads else {}
    pool = Counted(toy.client_hosts)
    job = Job("look", "map", 0, ())
    common = {} if with_payloads else {"peers": models}
    found = list(Hosts(pool).dispatch(job, dict.fromkeys(clients, 1.0), common, payloads, at_a_time=1))
    assert sorted(client for result in found for client in result.values) == list(clients)
    assert set(pool.most.values()) == {3}


def test_trees_without_known_tensors_are_copied_as_often_as_they_are_read() -> None:
    array = to_numpy({"x": torch.ones(3)})["x"]
    twice = from_numpy({"x": array, "y": array})
    assert twice["x"] is not twice["y"]
    made: dict[int, torch.Tensor] = {}
    shared = from_numpy({"x": array, "y": array}, made=made)
    assert shared["x"] is shared["y"] is from_numpy({"z": array}, made=made)["z"]
