"""Part c: runs on Ray, whose actors are killed, share the GPU, or have it hidden from them."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import rayfl
from checks.bench import DEVICE, REHEARSAL
from checks.correct import difference, output_of, run_pytest
from checks.running import Check, Record, SkippedError
from rayfl.tracking.callback import RunInfo


class Watching(rayfl.Callback):
    """Notes a run's plan, hosts, seconds, page faults of all hosts and failures, and may kill an actor.

    Args:
        kill_after: the round (1-indexed) after which an actor is killed, in the midst of the next one; 0: none is.
    """

    def __init__(self, kill_after: int = 0) -> None:
        self.plan: list[str] = []
        self.pids: list[int] = []
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self.faults: list[int] = []
        self.used = ""
        self._kill_after = kill_after

    def on_start(self, run: RunInfo) -> None:
        self.plan = list(run.plan)
        self.pids = [int(host["pid"]) for host in run.hosts]

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.seconds.append(seconds)
        self.faults.append(sum(map(_faults, self.pids)) - sum(self.faults))
        if DEVICE.type == "cuda":
            self.used = output_of("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
        if rounds_completed == self._kill_after:
            threading.Timer(seconds / 2, os.kill, (self.pids[0], signal.SIGKILL)).start()

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.failures.append(reason)


def _faults(pid: int) -> int:
    """The page faults of a process that needed no disk, so far; 0 without ``/proc``, or when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[7])
    except OSError:
        return 0


def run_digits(
    folder: str, name: str, watching: Watching, sections: Mapping[str, Any] = MappingProxyType({}), **cluster: Any
) -> Path:
    """A run of SCAFFOLD on scikit-learn's digits, long enough to be disturbed; returns its folder.

    Args:
        folder: of runs.
        name: of the run.
        watching: sees it.
        sections: of the configuration, in place of these.
        cluster: of the cluster's section.
    """
    try:
        import ray  # noqa: F401
    except ImportError:
        raise SkippedError("Ray is not installed") from None
    rayfl.run(
        {
            "name": name,
            "storage_path": folder,
            "dataset": {"name": "digits"},
            "partition": {"name": "dirichlet", "num_clients": 20, "alpha": 0.5},
            "model": {"name": "two_nn"},
            "algorithm": {"name": "scaffold"},
            "train": {"rounds": 4, "clients_per_round": "all", "local_epochs": 20, "batch_size": 10, "lr": 0.05},
            "evaluation": {"every": 4},
            "tracking": {"tensorboard": False},
            **sections,
            "cluster": {"device": "cpu" if REHEARSAL else "cuda", **cluster},
        },
        callbacks=[watching],
    )
    return Path(folder) / name


def _server(folder: Path) -> Any:
    """The server's tree of a run's last commit."""
    from rayfl.storage.commits import CommitStore
    from rayfl.storage.files import Storage

    store = CommitStore(Storage(str(folder)))
    manifest = store.latest()
    assert manifest is not None
    return store.read_server(manifest)


def plan_of_a_run(record: Record) -> None:
    """What a run plans, and what its actors then take of the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        watching = Watching()
        run_digits(folder, "plan", watching)
    record.note("plan", watching.plan)
    record.note("processes on the GPU", watching.used or "none")
    record.note("s a round", watching.seconds)


def actor_killed(record: Record) -> None:
    """An actor that is killed in the midst of a round: the run rewinds, and ends with the same model."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"num_actors": 2 if REHEARSAL else 1, "probe": False}
        calm = _server(run_digits(folder, "calm", Watching(), **options))
        watching = Watching(kill_after=2)
        disturbed = _server(run_digits(folder, "disturbed", watching, **options))
    record.note("failures", watching.failures)
    apart = difference(disturbed, calm)
    record.note("largest difference", apart)
    assert watching.failures, "the actor was killed, and nobody noticed"
    assert apart <= (0.0 if REHEARSAL else 1e-5), f"other results, by {apart:.3g}"


def actors_share(record: Record) -> None:
    """One actor on the GPU, four and eight, which train clients one by one: the same model, in what time."""
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        for actors in (1, 2) if REHEARSAL else (1, 4, 8):
            watching, begun = Watching(), time.monotonic()
            options = {"num_actors": actors, "probe": False, **({} if REHEARSAL else {"actors_per_gpu": actors})}
            one_by_one = {"engine": {"mode": "looped"}}
            found = _server(run_digits(folder, f"shared-{actors}", watching, one_by_one, **options))
            expected = expected or found
            apart = difference(found, expected)
            about = {"s in all": time.monotonic() - begun, "s a round": watching.seconds[-1], "differs by": apart}
            record.note(f"{actors} actors", about)
            assert apart <= 1e-4, f"{actors} actors: other results, by {apart:.3g}"


def hidden_gpu(record: Record) -> None:
    """Tests on the CPU of a machine whose GPU is hidden."""
    run_pytest(record, ["tests/aggregation", "tests/engine/test_stack_sizes.py"], CUDA_VISIBLE_DEVICES="")


CHECKS = (
    Check("plan_of_a_run", 55, "The plan of a run, and what its actors take", plan_of_a_run),
    Check("actor_killed", 70, "An actor that is killed in the midst of a round", actor_killed),
    Check("actors_share", 80, "Actors that share the GPU", actors_share),
    Check("hidden_gpu", 30, "A machine whose GPU is hidden", hidden_gpu),
)
