"""Clients that train together, in each mode."""

from __future__ import annotations

from typing import Any

from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Task
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, cross_entropy, examples
from tests.support.toy_networks import TwoLayers

SPEC = InputSpec("image", (6,), 4)

TASK = Classification(Network(lambda: TwoLayers(6, 7, 4)))

TRAIN = TrainConfig(rounds=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01)


def clients(sizes: tuple[int, ...] = (11, 4, 23), task: Task = TASK, **train: Any) -> dict[int, Client]:
    context = RoundContext(1, 3, len(sizes), TRAIN.model_copy(update=train), RandomStreams(0))
    return {k: Client(k, {}, {"train": examples(n, SPEC, k)}, task, context, CPU) for k, n in enumerate(sizes)}


def trained(who: dict[int, Client], mode: str = "looped", start: Tree | None = None, **options: Any) -> dict[int, Tree]:
    """What ``client.train`` returns, by client."""
    task = next(iter(who.values())).task
    engine = Engine(task, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    start = start or task.network.initialize(0)
    found = run_procedures({k: client.train(start, cross_entropy, **options) for k, client in who.items()}, engine)
    for reply in found.values():
        if isinstance(reply, Exception):
            raise reply
    return found
