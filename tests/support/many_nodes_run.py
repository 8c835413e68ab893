"""A run that tells a test where it is, and waits for it: ``many_nodes_run.py CONFIG FOLDER GPUS``.

After round 2 it writes ``after-2`` into the folder and goes on when ``go-2`` is there, a file with the number of actors
to wait for. ``GPUS`` is ``none``, ``logical`` (Ray's bookkeeping says which device an actor has, its work is done on
the CPU) or ``mixed-up`` (every actor finds another device).
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import yaml

import rayfl
from actors.probing import actor as probe_actor
from actors.processes import ray_pool
from actors.processes.gpus import Gpu, own_gpu
from rayfl.errors import RayflError
from rayfl.tracking.callback import RunInfo


class Told(rayfl.Callback):
    """Writes and waits for the files.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, run: RunInfo) -> None:
        self._tell("after-0", [dict(host) for host in run.hosts])

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._tell(f"after-{rounds_completed}", sorted(actor["name"] for actor in own_actors()))
        go = self._folder / f"go-{rounds_completed}"
        while not go.exists():
            time.sleep(0.05)
        wanted = int(go.read_text() or 0)
        while len(own_actors()) < wanted:
            # the rounds between are what starts them
            time.sleep(0.05)
        if wanted:
            handles = [ray.get_actor(actor["name"], actor["namespace"]) for actor in own_actors()]
            ray.get([handle.describe.remote() for handle in handles])

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._tell("failure", reason)

    def _tell(self, name: str, content: Any) -> None:
        new = self._folder / f"{name}.new"
        new.write_text(json.dumps(content))
        new.rename(self._folder / name)


def own_actors() -> list[dict[str, str]]:
    """Names and namespaces of this run's actors."""
    found: Any = ray.util.list_named_actors(all_namespaces=True)
    return [actor for actor in found if actor["namespace"].startswith(f"rayfl-{NAME}-")]


def logical_gpu() -> Gpu:
    """The device that Ray's bookkeeping gives this actor."""
    (number,) = ray.get_gpu_ids()
    return Gpu(f"GPU-{ray.get_runtime_context().get_node_id()[:8]}-{number}", "cpu")


def another_gpu() -> Gpu:
    """A device of nobody else."""
    return Gpu(f"GPU-{uuid.uuid4()}", "cpu")


if __name__ == "__main__":
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    NAME = config["name"]
    fakes = {"none": own_gpu, "logical": logical_gpu, "mixed-up": another_gpu}
    ray_pool.own_gpu = probe_actor.own_gpu = fakes[sys.argv[3]]
    try:
        rayfl.run(config, callbacks=[Told(Path(sys.argv[2]))])
    except RayflError as error:
        sys.exit(f"{type(error).__name__}: {error}")
