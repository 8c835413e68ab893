"""What options of the section ``cluster`` are worth, as Markdown tables of ratios.

    python scripts/bench/bench_cluster.py [--tables balance,shared_memory] [--rounds N] [--repeats N]

Federated averaging by two actors on two cores of one machine; the values of an option take turns; medians over rounds,
and then over turns. ``balance``: TwoNN, 60 of 300 clients with 50 samples a round, once with the actors as they are,
and once with actor 0 kept on a core that it shares with another busy process, which is what a slower node of a cluster
is. ``shared_memory``: two clients a round, one step each, so that a round is mostly messages. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rayfl
from rayfl.tracking.callback import RunInfo

CLIENTS, LEARNING = 300, 8


class Watch(rayfl.Callback):
    """Seconds of rounds; where it is wanted, with a neighbour on the first actor's core.

    Args:
        crowded: whether it is.
    """

    def __init__(self, crowded: bool) -> None:
        self.seconds: list[float] = []
        self._crowded = crowded
        self._neighbour: subprocess.Popen[bytes] | None = None

    def on_start(self, run: RunInfo) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for core, host in zip(cores, run.hosts, strict=False):
            for thread in Path(f"/proc/{host['pid']}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        if self._crowded:
            self._neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            os.sched_setaffinity(self._neighbour.pid, {cores[0]})

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.seconds.append(seconds)

    def on_end(self, rounds_completed: int) -> None:
        if self._neighbour is not None:
            self._neighbour.kill()
            self._neighbour.wait()


def measure(watch: Watch, rounds: int, cohort: int, batch_size: int, model: str, **cluster: Any) -> float:
    """Median seconds of a round, after some rounds in which there is something to learn."""
    with tempfile.TemporaryDirectory() as folder:
        rayfl.run(
            {
                "name": "cluster",
                "storage_path": folder,
                "dataset": {"name": "custom", "function": "growth:data"},
                "model": {"name": model},
                "algorithm": {"name": "fedavg"},
                "train": {"rounds": LEARNING + rounds + 1, "clients_per_round": cohort, "local_epochs": 1,
                          "batch_size": batch_size, "lr": 0.01, "momentum": 0.9},
                "evaluation": {"every": LEARNING + rounds + 1, "cohort_every": 0, "splits": ["test"]},
                "tracking": {"tensorboard": False},
                "storage": {"commit_every": LEARNING + rounds + 1},
                "cluster": {"num_actors": 2, **cluster},
            },
            callbacks=[watch],
        )  # fmt: skip
    # the last round has the evaluation and the commit of the end
    return statistics.median(watch.seconds[LEARNING:-1])


def row(what: str, repeats: int, one: Callable[[], float], other: Callable[[], float]) -> None:
    """Two ways in turns, as a row of a table."""
    turns = [(one(), other()) for _ in range(repeats)]
    medians = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(before / after for before, after in turns)
    print(f"| {what} | {' | '.join(f'{seconds:.3f}' for seconds in medians)} | {ratio:.2f} |", flush=True)


def balance(options: argparse.Namespace) -> None:
    """Measured assignments of clients to actors."""
    print("| two actors | sizes, seconds a round | measured | sizes / measured |\n|---|--:|--:|--:|")

    def timed(way: str, crowded: bool) -> float:
        return measure(Watch(crowded), options.rounds, 60, 10, "two_nn", balance=way)

    for what, crowded in (("equally fast", False), ("one has half a core", True)):
        row(what, options.repeats, partial(timed, "sizes", crowded), partial(timed, "measured", crowded))


def shared_memory(options: argparse.Namespace) -> None:
    """Messages through memory that stays mapped."""
    print("| model | object store, seconds a round | shared memory | ratio |\n|---|--:|--:|--:|")

    def timed(limit: str, model: str) -> float:
        return measure(Watch(crowded=False), options.rounds, 2, 50, model, shared_memory=limit)

    for what, model in (("TwoNN, 0.8 MB", "two_nn"), ("TwoCNN, 6.6 MB", "two_cnn")):
        row(what, options.repeats, partial(timed, "0", model), partial(timed, "256MiB", model))


def main() -> None:
    tables = {"balance": balance, "shared_memory": shared_memory}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", default=",".join(tables), help="which")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    options = parser.parse_args()
    scripts = str(Path(__file__).parent)
    os.environ |= {"RAYFL_GROWTH_CLIENTS": str(CLIENTS), "RAY_worker_niceness": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))
    for table in options.tables.split(","):
        tables[table](options)


if __name__ == "__main__":
    main()
