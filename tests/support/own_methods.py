"""Users' own methods, named in configurations as tests.support.own_methods:<class>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import rayfl
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class NoNewcomers(rayfl.Averaging):
    """Keeps a list with a model for each client that trains, and knows of no others."""

    name: Literal["no_newcomers"] = "no_newcomers"

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), "numbers": {str(i): i for i in range(context.num_clients)}}

    async def predictors(self, client: Client, server: Tree) -> Mapping[str, Predictor]:  # type: ignore[override]
        known: Sequence[int] = list(server["numbers"].values())
        assert known[client.id] == client.id
        return {"global": Predictor.of(server["model"])}
