"""What the host does in a round of many tiny clients, as a Markdown table.

    OMP_NUM_THREADS=1 python scripts/bench/host_time.py [--clients N] [--rounds N] [--methods A,B] [--on-ray]
    OMP_NUM_THREADS=1 python scripts/bench/host_time.py --profile METHOD

Every client has ten samples and takes one step; a model has some thirty numbers. So nearly all of the time is what
surrounds the steps: draws, plans, states, stacks, sums. Everything runs in this process and in one thread, with all
clients in stacks. The table has the processor time of a round, the least of those after the first, which other work on
the machine disturbs least.

``--on-ray`` measures whole runs instead, with one actor on Ray: also messages, and the scores of the models that each
round's clients have just trained, which nearly all of them have no test samples for. Seconds are those of a clock.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import rayfl
from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.state import ClientStates
from actors.processes.garbage import settle
from actors.processes.pool import InlinePool
from algorithms.registry import METHODS
from rayfl.data.federated import FederatedDataset
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples, InputSpec
from rayfl.models.zoo import TwoNN
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification

SPEC = InputSpec("image", (1, 1, 4), 3)
SAMPLES = 10
OPTIONS: dict[str, dict[str, Any]] = {"superfed": {"start": 0.0}}  # two models from the first round on


class Tiny(FederatedDataset):
    """Clients with ten random samples each."""

    def __init__(self, clients: int) -> None:
        self.names, self.spec = tuple(map(str, range(clients))), SPEC
        generator = torch.Generator().manual_seed(0)
        self._x = torch.rand(clients, SAMPLES, *SPEC.shape, generator=generator)
        self._y = torch.randint(SPEC.num_classes, (clients, SAMPLES), generator=generator)

    def sizes(self) -> np.ndarray:
        """Ten samples to train on, and none else."""
        return np.tile(np.array([SAMPLES, 0, 0], np.int64), (len(self.names), 1))

    def load(self, client: int) -> Mapping[str, Examples]:
        """The samples of a client."""
        own = Examples(self._x[client], self._y[client])
        none = Examples(own.x[:0], own.y[:0])
        return {"train": own, "validation": none, "test": none}


class Rounds:
    """Rounds of a method in which all clients take part, without scores."""

    def __init__(self, name: str, clients: int) -> None:
        method = METHODS[name](**OPTIONS.get(name, {}))
        train = TrainConfig(rounds=1000, clients_per_round="all", local_epochs=1, batch_size=SAMPLES, lr=0.1)
        task = Classification(TwoNN(hidden=(4,)).network(SPEC))
        context = RoundContext(0, train.rounds, clients, train, RandomStreams(0))
        engine = Engine(task, torch.device("cpu"), EngineConfig(mode="vectorized", width=clients))
        dataset = Tiny(clients)
        host = ClientHost(method, engine, dataset, context, ClientStates(None, 0, None), batch_size=256)
        self._federation = Federation(Hosts(InlinePool([host])), task, context, dataset.sizes())
        self._method, self._server, self._clients, self._round = method, method.init(task, context), clients, 0
        settle()  # as an actor does, once it has its host

    def play(self) -> float:
        """Plays a round, and returns its processor time in seconds."""
        start = time.process_time()
        self._federation.begin_round(self._round, ())
        changed = self._method.round(self._server, list(range(self._clients)), self._federation)
        self._server = {**self._server, **changed}
        self._round += 1
        return time.process_time() - start


class Scored(Tiny):
    """The same clients, of whom two have test samples: a run needs some."""

    def sizes(self) -> np.ndarray:
        """Ten samples to train on; two clients have as many to test with."""
        sizes = super().sizes()
        sizes[:2, 2] = SAMPLES
        return sizes

    def load(self, client: int) -> Mapping[str, Examples]:
        """The samples of a client."""
        own = super().load(client)
        return {**own, "test": own["train"]} if client < 2 else own


def scored(streams: RandomStreams) -> Scored:
    """Named in the configuration; called in every process."""
    return Scored(int(os.environ["HOST_TIME_CLIENTS"]))


class Clock(rayfl.Callback):
    """Notes how long rounds take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.seconds.append(seconds)


def on_ray(name: str, clients: int, rounds: int) -> float:
    """Seconds of a round of a run: the median of those after the first, and before the last, which is scored."""
    clock = Clock()
    os.environ["HOST_TIME_CLIENTS"] = str(clients)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "name": "run", "storage_path": folder, "dataset": {"name": "custom", "function": "host_time:scored"},
            "model": {"name": "two_nn", "hidden": [4]},
            "algorithm": {"name": name, **OPTIONS.get(name, {})},
            "train": {"rounds": rounds + 2, "clients_per_round": "all", "batch_size": SAMPLES, "lr": 0.1},
            "engine": {"mode": "vectorized", "width": clients},
            "evaluation": {"every": rounds + 2}, "tracking": {"tensorboard": False},
            "storage": {"commit_every": rounds + 2}, "cluster": {"device": "cpu", "num_actors": 1},
        }  # fmt: skip
        rayfl.run(settings, callbacks=[clock])
    return statistics.median(clock.seconds[1:-1])


def main() -> None:
    """Prints the table, or the profile of a method's round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", default="fedavg,superfed", help="names, separated by commas")
    parser.add_argument("--profile", choices=METHODS)
    parser.add_argument("--on-ray", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        rounds = Rounds(arguments.profile, arguments.clients)
        rounds.play()
        with cProfile.Profile() as profile:
            rounds.play()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    print(f"| method | seconds a round of {arguments.clients:,} clients |\n|---|--:|")
    for name in arguments.methods.split(","):
        if arguments.on_ray:
            print(f"| {name} | {on_ray(name, arguments.clients, arguments.rounds):.3f} |", flush=True)
            continue
        rounds = Rounds(name, arguments.clients)
        rounds.play()
        print(f"| {name} | {min(rounds.play() for _ in range(arguments.rounds)):.3f} |", flush=True)
    gc.unfreeze()  # or libraries that look for leaks at the end would find some


if __name__ == "__main__":
    main()
