"""Time, memory and disk of one run with many clients, as a Markdown table.

    python scripts/bench/measure_scale.py PRESET [OVERRIDE ...]

Runs the preset in a new folder and reads the resident memory of the driver and of its actors from /proc after every
round (Linux), and what of the clients' states is in files by then because of ``cluster.state_memory``. Times count from
the moment Ray is up.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

import rayfl
from algorithms.registry import Experiment
from cluster.rounds.session import ray_session
from cluster.run import run_config
from rayfl.config.loading import load_config
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tracking.callback import RunInfo

_MIB = 1 << 20


class Meter(rayfl.Callback):
    """Notes times and memory.

    Args:
        spill: where states go that have no room in memory.
    """

    def __init__(self, spill: Path) -> None:
        self._spill = spill
        self.spilled = 0
        self.begun = time.perf_counter()
        self.first_round_s = 0.0
        self.evaluation_s: list[float] = []
        self.driver: list[int] = []
        self.actors_peak = 0
        self._pids: list[int] = []
        self._over = threading.Event()

    def on_start(self, run: RunInfo) -> None:
        self._pids = [int(host["pid"]) for host in run.hosts]
        threading.Thread(target=self._watch, daemon=True).start()

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        if seconds.get("evaluation", 0) > 1:
            self.evaluation_s.append(seconds["evaluation"])

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if not self.driver:
            self.first_round_s = time.perf_counter() - self.begun
        self.driver.append(resident(os.getpid()))
        self.spilled = max(self.spilled, size_of(self._spill))

    def on_end(self, rounds_completed: int) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.actors_peak = max([self.actors_peak, *(resident(pid) for pid in self._pids)])


def resident(pid: int) -> int:
    """Bytes of a process's own memory (without pages of files that it shares); 0 for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines())
    # A process that has ended but is not yet waited for has no memory lines.
    return int(lines.get("RssAnon", "0").split()[0]) * 1024


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, some of which may go meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def main(preset: str, overrides: list[str]) -> None:
    """Runs and prints."""
    with tempfile.TemporaryDirectory() as folder:
        runs, spill = Path(folder) / "runs", Path(folder) / "spill"
        spill.mkdir()
        placed = [f"storage_path={runs}", "name=scale", f"cluster.spill_dir={spill}"]
        config = load_config(Experiment, preset, [*overrides, *placed])
        with ray_session(config.cluster.address):
            ray.get(ray.remote(lambda: None).remote())  # a worker has started: Ray is up
            meter = Meter(spill)
            result = run_config(config, [meter])
            total = time.perf_counter() - meter.begun
        last = CommitStore(Storage(str(runs / "scale"))).latest()
        assert last is not None
        states = len(last.states), sum(file.size for file in set(last.states.values()))
        _print(config, result, meter, total, size_of(runs), states)


def _print(config: Any, result: rayfl.Result, meter: Meter, total: float, size: int, states: tuple[int, int]) -> None:
    clients = max(row["clients"] for row in result.rounds.to_pylist())
    every = config.evaluation.every or config.train.rounds
    # after the first rounds, and before and after every evaluation: between these it should stay as it is
    marks = sorted(
        {
            0,
            len(meter.driver) - 1,
            *(i for e in range(every, len(meter.driver) + 1, every) for i in (e - 2, e) if i < len(meter.driver)),
        }
    )
    rows = [
        ("clients, rounds, cohort", f"{clients:,}, {config.train.rounds}, {config.train.clients_per_round}"),
        ("start to the end of round 1 (Ray being up)", f"{meter.first_round_s:.1f} s"),
        ("all rounds and evaluations", f"{total:.1f} s"),
        ("one evaluation of all clients", ", ".join(f"{s:.1f} s" for s in meter.evaluation_s)),
        (f"driver's memory after rounds {', '.join(str(i + 1) for i in marks)}", ", ".join(
            f"{meter.driver[i] / _MIB:.0f}" for i in marks) + " MiB"),
        ("largest memory of an actor", f"{meter.actors_peak / _MIB:.0f} MiB"),
        ("clients' states in the last commit", f"{states[0]:,}, {states[1] / _MIB:.1f} MiB"),
        ("most in files of the actors, beyond cluster.state_memory", f"{meter.spilled / _MIB:.1f} MiB"),
        ("run folder (two commits, tables)", f"{size / _MIB:.1f} MiB"),
    ]  # fmt: skip
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Ray {ray.__version__}\n")
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
