"""Clients with validation samples, networks of two architectures, and what travelled, for the tests of FedMe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from actors.federation.federation import Federation
from algorithms.fedme import FedMe
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork, SoftmaxRegression, TwoLayers
from tests.support.toys import ListDataset, Toy, random_clients

SIZES = (9, 12, 6, 10, 7)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def clients(sizes: Sequence[int] = SIZES, public: int = 6) -> ListDataset:
    """Random clients whose validation samples are their first four training samples, at most."""
    plain = random_clients(sizes, public=public)
    parts = [plain.load(k)["train"] for k in range(len(sizes))]
    pairs, held = [(part.x, part.y) for part in parts], [(part.x[:4], part.y[:4]) for part in parts]
    return ListDataset(pairs, public=plain.load_public(), validation=held)


def two_architectures(inputs: int = 5, hidden: int = 7, classes: int = 3) -> Classification:
    """0: softmax regression; 1: a hidden layer."""
    candidates = [
        Classification(DoubleNetwork(lambda: SoftmaxRegression(inputs, classes))),
        Classification(DoubleNetwork(lambda: TwoLayers(inputs, hidden, classes))),
    ]
    return Classification(candidates[0].network, candidates)


def own_weights(toy: Toy, architectures: Sequence[int]) -> Toy:
    """The same toy, whose slots begin with different weights, of the given architectures."""
    models = [toy.task.candidates[a].network.initialize(100 + slot) for slot, a in enumerate(architectures)]
    toy.server = FedMe.tree(models, architectures)
    return toy


@dataclass
class Call:
    """One call of ``Federation.map``."""

    procedure: str
    payloads: dict[int, Tree]
    replies: dict[int, Tree]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Everything that goes from server to clients and back."""
    seen: list[Call] = []
    send = Federation.map

    def recording(
        self: Federation, procedure: Any, cohort: Any, broadcast: Any, payloads: Any = None, **options: Any
    ) -> dict[int, Any]:
        replies = send(self, procedure, cohort, broadcast, payloads, **options)
        seen.append(Call(procedure.__name__, copy(payloads or {}), copy(replies)))
        return replies

    monkeypatch.setattr(Federation, "map", recording)
    return seen


class Forced(FedMe):
    """FedMe with a given exchange, and given choices, by round."""

    name: Literal["forced"] = "forced"  # type: ignore[assignment]
    given: tuple[tuple[int, ...], ...]
    replacing: tuple[tuple[bool, ...], ...] = ()

    def sources(self, clusters: Sequence[int], context: RoundContext) -> list[int]:
        return list(self.given[min(context.round, len(self.given) - 1)])

    async def replaces(self, client: Any, trained: Tree, architectures: Any) -> bool:
        if self.replacing:
            return self.replacing[client.round][client.id]
        return await super().replaces(client, trained, architectures)


def mean(*trees: Tree) -> Tree:
    """The plain mean of some models."""
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}
