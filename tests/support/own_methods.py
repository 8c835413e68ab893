"""Users' own methods, named in configurations as tests.support.own_methods:<class>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

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


class OfSamples(rayfl.Averaging):
    """Says that its clients' samples can be private."""

    name: Literal["of_samples"] = "of_samples"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""


class Silent(OfSamples):
    """Says nothing of it: what it derives from does not count."""


class Twice(OfSamples):
    """Has its clients train twice in a round, from one model."""

    no_example_privacy: ClassVar[str] = ""

    def round(self, server: Tree, cohort: Sequence[int], clients: rayfl.Clients) -> Tree:
        clients.mean(self.local_update, cohort, {"model": server["model"]})
        return clients.mean(self.local_update, cohort, {"model": server["model"]})
