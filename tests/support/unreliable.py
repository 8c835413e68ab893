"""Six clients on some hosts, of which some fail on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.state import ClientStates
from actors.processes.pool import InlinePool
from algorithms.base import Averaging, Clients
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import DataError
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tasks.base import Task
from tests.support.toy_networks import softmax_regression
from tests.support.toys import CPU, random_clients

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
