"""How cost grows with clients, cohort, model and actors: seconds per round and memory, as a table and a picture.

    python scripts/bench/growth.py [--out docs/benchmarks.md]

Each point is a run of its own in a new process: federated averaging of a two-layer network, 50 samples of 28 x 28 a
client, made when they are asked for; one number is changed, the others are 1,000 clients, 10 of them per round, 0.2
million parameters and 2 actors. Seconds are medians over rounds after the first two; memory is the largest that the
driver and all actors have for themselves (Linux). Without ``--out`` the table is printed only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

mpl.use("Agg")
from matplotlib import pyplot
from measure_scale import resident

import rayfl
from rayfl.data.federated import FederatedDataset
from rayfl.examples import Examples, InputSpec
from rayfl.tracking.callback import RunInfo

BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"
SAMPLES, TEST_SAMPLES, ROUNDS, NOT_COUNTED = 50, 1, 8, 2


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        clients: K.
        cohort: clients per round.
        hidden: width of the two hidden layers.
        actors: their number.
    """

    clients: int = 1000
    cohort: int = 10
    hidden: int = 200
    actors: int = 2

    @property
    def parameters(self) -> int:
        """Of the network 784 - hidden - hidden - 10."""
        return 785 * self.hidden + (self.hidden + 1) * self.hidden + (self.hidden + 1) * 10


AXES: dict[str, tuple[str, list[Point]]] = {
    "clients": ("clients (K)", [Point(clients=k) for k in (100, 1000, 10_000)]),
    "cohort": ("clients per round", [Point(cohort=c) for c in (10, 100, 1000)]),
    "parameters": ("parameters", [Point(hidden=h) for h in (100, 200, 700, 2000, 4600)]),
    "actors": ("actors", [Point(cohort=100, actors=a) for a in (1, 2)]),
}


class Drawn(FederatedDataset):
    """Samples of a client drawn from its number when they are asked for."""

    def __init__(self, clients: int) -> None:
        self.spec = InputSpec("image", (1, 28, 28), 10)
        self.names = tuple(map(str, range(clients)))

    def sizes(self) -> np.ndarray:
        return np.tile([SAMPLES, 0, TEST_SAMPLES], (len(self.names), 1))

    def load(self, client: int) -> Mapping[str, Examples]:
        generator = torch.Generator().manual_seed(client)

        def examples(count: int) -> Examples:
            y = torch.randint(0, 10, (count,), generator=generator)
            return Examples(torch.rand(count, 1, 28, 28, generator=generator), y)

        return {"train": examples(SAMPLES), "validation": examples(0), "test": examples(TEST_SAMPLES)}


def data(streams: object) -> Drawn:
    """Named in the configuration; called in every process."""
    return Drawn(int(os.environ["RAYFL_GROWTH_CLIENTS"]))


class Meter(rayfl.Callback):
    """Seconds of rounds, and memory after each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.driver: list[int] = []
        self.actors: list[int] = []
        self._pids: list[int] = []

    def on_start(self, run: RunInfo) -> None:
        self._pids = [int(host["pid"]) for host in run.hosts]

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.seconds.append(seconds)
        self.driver.append(resident(os.getpid()))
        self.actors.append(sum(map(resident, self._pids)))


def measure(point: Point) -> dict[str, float]:
    """Runs one point in this process."""
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        rayfl.run(
            {
                "name": "growth",
                "storage_path": folder,
                "dataset": {"name": "custom", "function": "growth:data"},
                "model": {"name": "two_nn", "hidden": [point.hidden, point.hidden]},
                "algorithm": {"name": "fedavg"},
                "train": {"rounds": ROUNDS, "clients_per_round": point.cohort, "local_epochs": 1, "batch_size": 10,
                          "lr": 0.01, "momentum": 0.9},
                "evaluation": {"every": ROUNDS + 1, "cohort_every": 0, "splits": ["test"]},
                "tracking": {"tensorboard": False},
                "storage": {"commit_every": ROUNDS},
                "cluster": {"num_actors": point.actors},
            },
            callbacks=[meter],
        )  # fmt: skip
    # the last round has the evaluation and the commit of the end
    return {
        "seconds": float(np.median(meter.seconds[NOT_COUNTED:-1])),
        "driver_mib": max(meter.driver[:-1]) / 2**20,
        "actors_mib": max(meter.actors[:-1]) / 2**20,
    }


def in_a_new_process(point: Point) -> dict[str, float]:
    """The same, with nothing left of earlier points."""
    environment = {
        **os.environ,
        "RAYFL_GROWTH_CLIENTS": str(point.clients),
        "PYTHONPATH": str(Path(__file__).parent),
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, __file__, "--one", json.dumps(asdict(point))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{point} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    print(point, found, flush=True)
    return found


def table(results: Mapping[Point, Mapping[str, float]]) -> str:
    """Markdown."""
    lines = [
        "| clients | per round | parameters | actors | seconds per round | driver, MiB | actors together, MiB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for point, found in results.items():
        lines.append(
            f"| {point.clients:,} | {point.cohort:,} | {point.parameters:,} | {point.actors} | {found['seconds']:.3f} "
            f"| {found['driver_mib']:,.0f} | {found['actors_mib']:,.0f} |"
        )
    return "\n".join(lines)


def draw(results: Mapping[Point, Mapping[str, float]], path: Path) -> None:
    """Seconds above, memory below; one column an axis."""
    figure, rows = pyplot.subplots(2, len(AXES), figsize=(13, 5.5), layout="constrained", sharex="col")
    for i, (name, (label, points)) in enumerate(AXES.items()):
        x = [getattr(point, name) for point in points]
        rows[0][i].plot(x, [results[point]["seconds"] for point in points], marker="o")
        for quantity, legend in (("driver_mib", "driver"), ("actors_mib", "actors together")):
            rows[1][i].plot(x, [results[point][quantity] for point in points], marker="o", label=legend)
        for axis in (rows[0][i], rows[1][i]):
            axis.set_xscale("log" if name != "actors" else "linear")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        if name == "actors":
            rows[1][i].set_xticks(x)
        rows[1][i].set_xlabel(label)
    rows[0][0].set_ylabel("seconds per round")
    rows[1][0].set_ylabel("memory, MiB")
    rows[1][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="page to write the table into, between its marks; the picture beside")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(Point(**json.loads(arguments.one)))))
        return
    every = dict.fromkeys(replace(point) for _, points in AXES.values() for point in points)
    results = {point: in_a_new_process(point) for point in every}
    print(table(results))
    if arguments.out is not None:
        draw(results, arguments.out.with_name("growth.png"))
        page = arguments.out.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        command = f"python scripts/bench/growth.py --out {arguments.out}"
        when = f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPUs."
        text = f"{before}{BEGIN}\n{table(results)}\n\n{when}\n\n![](growth.png)\n{END}{after}"
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
