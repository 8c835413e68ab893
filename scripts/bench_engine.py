"""What one client's local update costs on the CPU, as Markdown tables of ratios.

    python scripts/bench_engine.py [--models NAME,...] [--momentum M] [--weight-decay W] [--repeats N] [--steps N]
                                   [--compile]

The first table sets a bare PyTorch loop with ``torch.optim.SGD`` against the engine's kernels (and, with ``--compile``,
against itself with ``torch.compile``), the second one methods against federated averaging under each kernel. Everything
runs in one thread; the contenders of a row take turns, and the medians of their processor times are compared, so that
other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.allocator import reuse_freed_memory
from actors.building import pin_threads
from algorithms.base import Averaging
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.floco import Floco
from algorithms.superfed import SuPerFed
from rayfl.data.federated import Examples, InputSpec
from rayfl.engine.batches import plan_batches
from rayfl.engine.client import Client, RoundContext
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.settings import TrainConfig
from rayfl.engine.trampoline import run_procedures
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, TwoCNN, TwoNN
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
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
METHODS: dict[str, Averaging] = {
    "superfed": SuPerFed(start=0.0),
    "floco": Floco(),
    "fedphp": FedPHP(),
    "ditto": Ditto(),
}
Contenders = dict[str, Callable[[], None]]


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

    def method(self, algorithm: Averaging, kernel: str) -> Callable[[], None]:
        """A method's local update, for a client that has taken part before."""
        engine = Engine(self.task, _CPU, EngineConfig(mode="looped", kernel=kernel))  # type: ignore[arg-type]
        server = algorithm.init(self.task, self.context)
        received = {"body": server["body"], "endpoints": server["endpoints"]} if "body" in server else server["model"]
        state: Tree = {}

        def run() -> None:
            nonlocal state
            examples = {"train": self.examples}
            client = Client(0, dict(state), examples, self.task, self.context, _CPU)
            outcome = run_procedures({0: algorithm.local_update(client, received)}, engine)[0]
            if isinstance(outcome, Exception):
                raise outcome
            state = client.state

        return run


def _examples(spec: InputSpec, samples: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x: Tensor
    if spec.kind == "tokens":
        x = torch.randint(0, spec.vocabulary, (samples, *spec.shape), generator=generator)
    else:
        x = torch.rand(samples, *spec.shape, generator=generator)
    return Examples(x, torch.randint(0, spec.num_classes, (samples,), generator=generator))


def medians(contenders: Contenders, repeats: int) -> dict[str, float]:
    """Median processor time in seconds of each contender; they take turns, after one turn each that is not counted."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            begun = time.process_time()
            run()
            times[name].append(time.process_time() - begun)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=0, help="local steps a turn; 0: as many as take a moment")
    parser.add_argument("--compile", action="store_true", help="also the bare loop with torch.compile")
    chosen = parser.parse_args()
    pin_threads(1)
    reuse_freed_memory()
    kernels = ("reference", "fast")
    beside = [*kernels, "compiled"] if chosen.compile else list(kernels)
    columns = " | ".join(f"{name} / bare" for name in beside)
    first = [f"| model | bare PyTorch, ms a step | {columns} |", f"|---|---|{'---|' * len(beside)}"]
    second = [f"| model | kernel | {' | '.join(METHODS)} |", f"|---|---|{'---|' * len(METHODS)}"]
    for model in chosen.models.split(","):
        steps = chosen.steps or {"two_nn": 100, "char_lstm": 2}.get(model, 10)
        work = Workload(model, steps, chosen.momentum, chosen.weight_decay)
        contenders: Contenders = {"bare": work.bare()}
        if chosen.compile:
            contenders["compiled"] = work.bare(compiled=True)
        for kernel in kernels:
            contenders[kernel] = work.method(FedAvg(), kernel)
            contenders |= {f"{kernel} {name}": work.method(method, kernel) for name, method in METHODS.items()}
        times = medians(contenders, chosen.repeats)
        bare = times["bare"]
        ratios = " | ".join(f"{times[name] / bare:.2f}" for name in beside)
        first.append(f"| {model} | {1000 * bare / steps:.2f} | {ratios} |")
        for kernel in kernels:
            ratios = " | ".join(f"{times[f'{kernel} {name}'] / times[kernel]:.2f}" for name in METHODS)
            second.append(f"| {model} | {kernel} | {ratios} |")
    print("\n".join([*first, "", "Local updates of methods, federated averaging = 1:", "", *second]))


if __name__ == "__main__":
    main()
