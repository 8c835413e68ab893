"""A method that counts its calls, in a world of hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.state import ClientStates
from actors.processes.pool import InlinePool
from algorithms.base import Averaging
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.toy_networks import softmax_regression
from tests.support.toys import CPU, random_clients


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
