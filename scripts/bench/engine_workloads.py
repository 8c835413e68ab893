"""The clients whose local updates `bench_engine.py` times, in this checkout of rayfl or in another one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.floco import Floco
from algorithms.pfedme import PFedMe
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, TwoCNN, TwoNN
from rayfl.params import Tree
from rayfl.randomness import RandomStreams

try:
    from rayfl.engine.round_context import RoundContext
    from rayfl.examples import Examples, InputSpec
    from rayfl.tasks.classification import Classification
except ModuleNotFoundError:  # another checkout, from before modules lay in folders
    from rayfl.data.federated import Examples, InputSpec
    from rayfl.engine.client import RoundContext
    from rayfl.tasks import Classification

_CPU = torch.device("cpu")
_DIGITS, _LETTERS = InputSpec("image", (1, 28, 28), 10), InputSpec("image", (1, 28, 28), 62)
MODELS: dict[str, tuple[Architecture, InputSpec, int]] = {
    "two_nn": (TwoNN(), _DIGITS, 10),
    "two_cnn": (TwoCNN(), InputSpec("image", (3, 32, 32), 10), 10),
    "char_lstm": (CharLSTM(), InputSpec("tokens", (80,), 80, vocabulary=80), 50),
    "leaf_cnn": (LeafCNN(), _LETTERS, 10),
}
"""Model, inputs and batch size."""
METHODS: dict[str, Any] = {
    "fedavg": FedAvg(),
    "scaffold": Scaffold(momentum_on_corrected=True),
    "ditto": Ditto(),
    "pfedme": PFedMe(momentum_on_personal=True),
    "superfed": SuPerFed(start=0.0),
    "floco": Floco(),
    "fedphp": FedPHP(),
}
NO_WEIGHT_DECAY = ("pfedme",)
"""Methods that refuse it."""


class Workload:
    """One client with a model's random samples, and how it is trained."""

    def __init__(self, model: str, steps: int, momentum: float, weight_decay: float) -> None:
        self.architecture, self.spec, batch_size = MODELS[model]
        self.task = Classification(self.architecture.network(self.spec))
        self.examples = _examples(self.spec, steps * batch_size)
        train = TrainConfig(
            rounds=1, local_epochs=1, batch_size=batch_size, lr=0.01, momentum=momentum, weight_decay=weight_decay
        )
        self.context = RoundContext(0, 1, 1, train, RandomStreams(0))

    def bare(self, compiled: bool = False) -> Callable[[], None]:
        """What one writes without a framework; the first turn of a compiled one compiles."""
        module = self.architecture.build(self.spec)
        train, data = self.context.train, self.examples
        plan = plan_batches(len(data), train.batch_size, len(data) // (train.batch_size or 1), np.random.default_rng(0))

        def eager(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(module(x), y)

        loss = torch.compile(eager) if compiled else eager

        def run() -> None:
            optimizer = torch.optim.SGD(
                module.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
            )
            for start, stop in pairwise(plan.bounds):
                index = plan.order[start:stop]
                optimizer.zero_grad()
                loss(data.x[index], data.y[index]).backward()
                optimizer.step()

        return run

    def method(self, algorithm: Any, kernel: str = "", clients: int = 1, **stacked: Any) -> Callable[[], None]:
        """A method's local update, for clients that have taken part before."""
        options = {"kernel": kernel} if kernel else {"width": clients, **stacked}
        engine = Engine(self.task, _CPU, EngineConfig(**{"mode": "looped", **options}))
        server = algorithm.init(self.task, self.context)
        received = {"model": {"body": server["body"], "endpoints": server["endpoints"]} if "body" in server else server}
        if "model" in server:
            received = {name: server[name] for name in ("model", "control") if name in server}
        states: list[Tree] = [{} for _ in range(clients)]

        def run() -> None:
            examples = {"train": self.examples}
            taking = [Client(k, dict(own), examples, self.task, self.context, _CPU) for k, own in enumerate(states)]
            procedures = {client.id: algorithm.local_update(client, **received) for client in taking}
            for outcome in run_procedures(procedures, engine).values():
                if isinstance(outcome, Exception):
                    raise outcome
            states[:] = [client.state for client in taking]

        return run


def _examples(spec: InputSpec, samples: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x: Tensor
    if spec.kind == "tokens":
        x = torch.randint(0, spec.vocabulary, (samples, *spec.shape), generator=generator)
    else:
        x = torch.rand(samples, *spec.shape, generator=generator)
    return Examples(x, torch.randint(0, spec.num_classes, (samples,), generator=generator))
