"""What measured assignments of clients to actors are worth, as a Markdown table of ratios.

    python scripts/bench_balance.py [--rounds N] [--repeats N]

Federated averaging of TwoNN, 60 of 300 clients with 50 samples a round, by two actors on two cores of one machine: once
as they are, and once with actor 0 kept on a core that it shares with another busy process, which is what a slower node
of a cluster is. ``cluster.balance=sizes`` and ``measured`` take turns; medians over rounds, and then over turns. Linux
only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import rayfl
from rayfl.tracking.callback import RunInfo

CLIENTS, COHORT, LEARNING = 300, 60, 8


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


def measure(balance: str, crowded: bool, rounds: int) -> float:
    """Median seconds of a round, after some rounds in which there is something to learn."""
    watch = Watch(crowded)
    with tempfile.TemporaryDirectory() as folder:
        rayfl.run(
            {
                "name": "balance",
                "storage_path": folder,
                "dataset": {"name": "custom", "function": "growth:data"},
                "model": {"name": "two_nn"},
                "algorithm": {"name": "fedavg"},
                "train": {"rounds": LEARNING + rounds + 1, "clients_per_round": COHORT, "local_epochs": 1,
                          "batch_size": 10, "lr": 0.01, "momentum": 0.9},
                "evaluation": {"every": LEARNING + rounds + 1, "cohort_every": 0, "splits": ["test"]},
                "tracking": {"tensorboard": False},
                "storage": {"commit_every": LEARNING + rounds + 1},
                "cluster": {"num_actors": 2, "balance": balance},
            },
            callbacks=[watch],
        )  # fmt: skip
    # the last round has the evaluation and the commit of the end
    return statistics.median(watch.seconds[LEARNING:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    options = parser.parse_args()
    scripts = str(Path(__file__).parent)
    os.environ |= {"RAYFL_GROWTH_CLIENTS": str(CLIENTS), "RAY_worker_niceness": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))
    print("| two actors | sizes, seconds a round | measured | sizes / measured |\n|---|--:|--:|--:|")
    for crowded, what in ((False, "alike"), (True, "one has half a core")):
        turns = [[measure(balance, crowded, options.rounds) for balance in ("sizes", "measured")]
                 for _ in range(options.repeats)]  # fmt: skip
        sizes, measured = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(one / other for one, other in turns)
        print(f"| {what} | {sizes:.3f} | {measured:.3f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
