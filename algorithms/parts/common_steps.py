"""Rounds in which all clients take the same number of steps along the same directions, which the server repeats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients
from algorithms.parts.shared_directions import SharedDirections
from algorithms.parts.zeroth_order import walked
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.params import Tree
from rayfl.tasks.base import Task


class CommonSteps(SharedDirections):
    """A method whose directions belong to the round: the server keeps the model, and when clients last knew it.

    A client that has missed rounds makes up for them with what the server has found in these, so that what it is sent
    grows with them. The simulation gives it the model that this leads to.
    """

    server_keeps: ClassVar[str] = "w, and each client's last round"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Returns how many steps a round has, and along how many directions a step goes."""

    @abstractmethod
    def down_bytes(self, missed: int, like: Tensor) -> int:
        """Returns how many bytes a client is sent.

        Args:
            missed: rounds since the last one that it took part in, with that one.
            like: has the model's type.
        """

    def message(self, found: Weighted) -> Weighted:
        """Returns what a client sends of its slopes, a ``table`` of :attr:`shape`."""
        return found

    def decided(self, mean: Tensor) -> Tensor:
        """Returns along each direction how far the server's step goes, given the mean of the messages."""
        return mean

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), "known": torch.zeros(context.num_clients, dtype=torch.int64)}

    def sent(self, server: Tree) -> Tree:
        steps, directions = self.shape
        return {"table": torch.zeros(steps, directions, dtype=next(iter(server["model"].values())).dtype)}

    def keys(self, context: RoundContext) -> np.ndarray:
        """Returns the keys of the round's directions, shape (*shape, 7)."""
        return drawn_keys(context.streams.generator("directions", context.round), *self.shape)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, known, round = server["model"], server["known"], clients.context.round
        like = next(iter(model.values()))
        down = {client: self.down_bytes(round - int(known[client]), like) for client in cohort}
        mean = clients.mean(self.walk, cohort, broadcast={"model": model}, down=down)
        after = clients.on_server(self.stepped, {"model": model, "table": self.decided(mean["table"])})
        chosen = torch.zeros(len(known), dtype=torch.bool)
        chosen[list(cohort)] = True
        return {**after, "known": torch.where(chosen, round, known)}

    async def walk(self, client: Client, model: Tree) -> Weighted:
        """Takes the round's steps on the client's samples, and sends what they have found."""
        table = await self.descended(client, model, self.keys(client.context))
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return self.message(Weighted({"table": table}, weight))

    async def stepped(self, server: Server, model: Tree, table: Tensor) -> Tree:
        """The model after the round's steps: what every client can make, too."""
        steps, directions = self.shape
        keys = torch.from_numpy(self.keys(server.context)).view(steps * directions, -1)
        amounts = server.lr / directions * table.double().flatten()
        return {"model": walked(model, keys, amounts, server.task)}
