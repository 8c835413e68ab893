"""What a client that took no part in training does before it is scored."""

from __future__ import annotations

from algorithms.base import Averaging
from rayfl.engine.client import Client
from rayfl.params import Tree


class TrainedNewcomers(Averaging):
    """A method whose newcomers do what a client of a cohort does, and send nothing."""

    async def join(self, client: Client, server: Tree) -> Tree:
        await self.local_update(client, server["model"])
        return {}
