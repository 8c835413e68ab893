"""SuPerFed on small problems: what its tests share."""

from __future__ import annotations

from typing import Any

from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, random_clients

SIZES = (20, 13, 10, 19)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-3
)
MODES = ("mm", "lm")
FREE = {"orthogonality_weight": 0.0, "proximal_weight": 0.0}


def toy(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def normed() -> Classification:
    return normalized_layers()


def client_of(run: Toy, id: int, round: int = 0) -> Client:
    """A client outside of a host, with its present state."""
    context = RoundContext(round, run.train.rounds, len(SIZES), run.train, RandomStreams(run.seed))
    return Client(id, run.states().get(id, {}), run.dataset.load(id), run.task, context, CPU)


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


def models(task: Any, count: int) -> list[Tree]:
    return [task.network.initialize(seed) for seed in range(1, count + 1)]
