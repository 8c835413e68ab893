# ruff: noqa: E402
"""Where the time of a round goes, in the race's works W1 and W3, as a Markdown table.

    OMP_NUM_THREADS=1 python scripts/bench/profile_rounds.py [--works W1,W3] [--rounds 12]

Runs them in one process without Ray under Python's profiler, which makes short calls look longer than they are. The
time of everything outside rayfl (PyTorch above all) counts for the part of rayfl that called it. Then once more on Ray,
for the seconds that the driver waits for its actors, and those in which they wait for it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

RACE = Path(__file__).parent.parent / "race"
sys.path[:0] = [str(RACE), str(RACE / "contenders")]
os.environ.update({"PYTHONPATH": str(RACE / "contenders"), "RAY_worker_niceness": "0"})

import numpy as np
import race
import torch
import with_rayfl
from work import WORKS, Task, Work

import rayfl
from rayfl.tracking.callback import Callback

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = {
    "rayfl/engine/gradients": "gradients",
    "rayfl/tasks": "gradients",
    "rayfl/models": "gradients",
    "algorithms": "gradients",
    "rayfl/optimization": "SGD",
    "rayfl/engine/scoring": "evaluation",
    "rayfl/metrics": "evaluation",
    "rayfl/engine": "local updates otherwise (batches, buffers)",
    "rayfl/objectives": "local updates otherwise (batches, buffers)",
    "rayfl/randomness": "local updates otherwise (batches, buffers)",
    "rayfl/aggregation/limbs": "exact sums",
    "rayfl/aggregation/fixed_point": "exact sums",
    "rayfl/aggregation": "exact sums",
    "rayfl/params": "copies of trees",
    "rayfl/data": "samples",
    "scripts/race/contenders": "samples",
    "rayfl/storage/commits": "commits and tables",
    "rayfl/storage/treefile": "commits and tables",
    "rayfl/storage": "commits and tables",
    "rayfl/storage/manifest": "commits and tables",
    "rayfl/results": "commits and tables",
    "actors": "hosts",
    "cluster": "driver",
}
"""Folders and modules, and what their time is called; the longest fitting beginning counts."""


class Phases(Callback):
    """Seconds of the phases of every round."""

    def __init__(self) -> None:
        self.found: list[Mapping[str, float]] = []
        self.begun = 0.0
        self.profile: cProfile.Profile | None = None

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        self.found.append(dict(seconds))
        if rounds_completed == 1 and self.profile is not None:
            self.profile.enable()  # without imports and the first look at everything


def part_of(place: tuple[str, int, str]) -> str | None:
    """What a function's own time is called; None for one outside rayfl."""
    try:
        name = Path(place[0]).resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return None
    fitting = [start for start in PARTS if name.startswith(start)]
    return PARTS[max(fitting, key=len)] if fitting else None


def shares(stats: Mapping[Any, Any]) -> Counter[str]:
    """Seconds by part; what is outside rayfl is divided among its callers by the time it spent for them."""

    @cache
    def owners(place: tuple[str, int, str], depth: int) -> tuple[tuple[str, float], ...]:
        own, callers = part_of(place), stats[place][4]
        if own is not None or not callers or depth > 12:
            return ((own or "rest", 1.0),)
        whole = sum(spent[3] for spent in callers.values()) or 1.0
        found: Counter[str] = Counter()
        for caller, spent in callers.items():
            for name, share in owners(caller, depth + 1):
                found[name] += share * spent[3] / whole
        return tuple(found.items())

    seconds: Counter[str] = Counter()
    for place, (_, _, own_time, _, _) in stats.items():
        for name, share in owners(place, 0):
            seconds[name] += share * own_time
    return seconds


def experiment(work: Work, folder: Path, **cluster: Any) -> dict[str, Any]:
    """The race's configuration of a work."""
    files = race.prepare(work, folder)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    path = folder / "task.json"
    Task(work, str(files), time.time(), str(scratch)).write(path)
    os.environ["RAYFL_RACE"] = str(path)
    return {**with_rayfl.configuration(Task.read(str(path))), "cluster": cluster}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="W1,W3")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Counter[str]] = {}
    phases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.works.split(","):
            work = replace(WORKS[name], rounds=chosen.rounds)
            watch = Phases()
            watch.profile = cProfile.Profile()
            rayfl.run(experiment(work, Path(folder), backend="inline"), callbacks=[watch])
            watch.profile.disable()
            parts[name] = shares(pstats.Stats(watch.profile).stats)  # type: ignore[attr-defined]
            watch = Phases()
            rayfl.run(experiment(work, Path(folder)), callbacks=[watch])
            medians = {key: float(np.median([row[key] for row in watch.found[2:-1]])) for key in watch.found[-1]}
            phases[name] = medians
    works = list(parts)
    print(f"| share of the time, one process | {' | '.join(works)} |\n|---|{'--:|' * len(works)}")
    for part in sorted({part for found in parts.values() for part in found}, key=lambda p: -parts[works[0]][p]):
        figures = [100 * parts[name][part] / parts[name].total() for name in works]
        print(f"| {part} | {' | '.join(f'{figure:.1f} %' for figure in figures)} |")
    print(f"\n| milliseconds of a round on Ray, two actors | {' | '.join(works)} |\n|---|{'--:|' * len(works)}")
    for label, key in (("waiting for actors", "clients"), ("the driver alone", "server"), ("commit", "commit")):
        print(f"| {label} | {' | '.join(f'{1000 * phases[name].get(key, 0.0):.1f}' for name in works)} |")


if __name__ == "__main__":
    main()
