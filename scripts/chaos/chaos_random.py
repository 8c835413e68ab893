"""Trials in one process at random moments: the driver killed, files damaged, clients that fail, disks that fill up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos_inline import METHODS, Laboratory
from chaos_trials import KILLED, MENDABLE, Trial, experiment, in_process, recovered, undisturbed

import rayfl
from cluster.run import run
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage


def driver_killed(laboratory: Laboratory, rng: random.Random) -> Trial:
    """``kill -9`` of the driver at a random moment, up to three times."""
    method, commit_every = rng.choice(METHODS), rng.choice((1, 1, 2, 3))
    calm, seconds = laboratory.calm(method)
    folder = laboratory.folder()
    config = experiment(folder, method) | {"storage": {"commit_every": commit_every}}
    moments = [rng.uniform(0.0, seconds) for _ in range(rng.randint(1, 3))]
    trial = Trial(
        "driver killed at a random moment",
        f"{method}, a commit every {commit_every} rounds, after {', '.join(f'{moment:.2f}' for moment in moments)} s",
    )
    statuses = [in_process(undisturbed, config, kill_after_s=s, log=folder / "log").status for s in moments]
    trial.struck = KILLED in statuses
    if set(statuses) - {KILLED, 0}:
        trial.problem = f"ended with {statuses}"
        return trial
    return recovered(trial, config, calm, folder / "log")


class _Killer(rayfl.Callback):
    """Kills this process when a commit is on storage."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_commit(self, rounds_completed: int) -> None:
        if rounds_completed == self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_after(config: dict[str, Any], commit: int) -> None:
    """Runs an experiment in this process, which is killed when that commit is on storage."""
    run(config, callbacks=[_Killer(commit)])


def file_damaged(laboratory: Laboratory, rng: random.Random) -> Trial:
    """A driver is killed, and then a file that only the newest commit names loses a bit, its end, or all."""
    method = rng.choice(METHODS)
    calm, _ = laboratory.calm(method)
    folder = laboratory.folder()
    config = experiment(folder, method)
    trial = Trial("file of the newest commit damaged", method)
    in_process(killed_after, config, rng.randint(2, 3), log=folder / "log")
    store = CommitStore(Storage(str(folder / "run")))
    manifests = [store.read_manifest(name) for name in store.manifests()]
    own = [*sorted(manifests[-1].files() - manifests[-2].files()), store.manifests()[-1], "newest.json"]
    path, how = folder / "run" / "commits" / rng.choice(own), rng.choice(("bit", "end", "all"))
    trial.detail += f", {path.name}: {how}"
    content = bytearray(path.read_bytes())
    if how == "all":
        path.unlink()
    elif how == "end":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    return recovered(trial, config, calm, folder / "log")


def client_fails(laboratory: Laboratory, rng: random.Random, how: str) -> Trial:
    """A client fails once; the run ends, unless it retries."""
    named = {
        "raise": "client raises",
        "diverge": "client returns NaN",
        "spoil": "client's state becomes NaN",
        "exhaust": "client asks for too much memory",
        "die": "client's process killed while it trains",
    }
    calm, _ = laboratory.calm("scaffold")
    folder = laboratory.folder()
    retry = how != "die" and rng.random() < 0.5
    failing = [[rng.randrange(4), client] for client in range(5)]
    faulty = {"name": "tests.support.faulty:Faulty", "failing": failing, "how": how, "marker": str(folder / "once")}
    config = experiment(folder, "scaffold") | {"algorithm": faulty}
    if retry:
        config["clients"] = {"on_error": "retry"}
    trial = Trial(named[how], f"{failing}{', retried' if retry else ''}")
    ended = in_process(undisturbed, config, log=folder / "log")
    trial.struck = (folder / "once").exists()
    expected = 0 if retry or not trial.struck else KILLED if how == "die" else MENDABLE
    if ended.status != expected:
        trial.problem = f"ended with {ended.status} in place of {expected}: {ended.answer}"
        return trial
    return recovered(trial, config, calm, folder / "log")


@contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[Path | None]:
    """A file system of its own; None where this process may not mount one."""
    place = folder / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def disk_fills_up(laboratory: Laboratory, rng: random.Random) -> Trial | None:
    """A real file system has room for a part of the run only; then there is room. None where none can be mounted."""
    calm, _ = laboratory.calm("scaffold")
    trial = Trial("disk full, a real file system")
    with _small_disk(folder := laboratory.folder(), "4m") as disk:
        if disk is None:
            return None
        room = rng.randrange(4096, 200_000)
        trial.detail = f"{room} bytes free"
        (disk / "ballast").write_bytes(b"\0" * (4 * 2**20 - room))
        config = experiment(disk, "scaffold")
        ended = in_process(undisturbed, config, log=folder / "log")
        trial.struck = ended.status == MENDABLE
        if ended.status not in (0, MENDABLE):
            trial.problem = f"ended with {ended.status}: {ended.answer}"
            return trial
        if trial.struck and "No space left" not in str(ended.answer):
            trial.problem = f"the message does not say why: {ended.answer}"
            return trial
        (disk / "ballast").unlink()
        return recovered(trial, config, calm, folder / "log")


def storage_unmounted(laboratory: Laboratory, rng: random.Random) -> Trial | None:
    """The run's file system is unmounted in the midst of a run, and mounted again. None where none can be mounted."""
    calm, seconds = laboratory.calm("scaffold")
    with _small_disk(folder := laboratory.folder(), "16m") as disk:
        if disk is None:
            return None
        moment = seconds * rng.uniform(0.1, 0.7)
        trial = Trial("storage unmounted", f"after {moment:.2f} s")
        place = folder / "place"
        place.mkdir()
        bind = ["mount", "--bind", str(disk), str(place)]
        unmount = ["umount", "--lazy", str(place)]
        subprocess.run(bind, check=True)
        config = experiment(place, "scaffold")
        timer = threading.Timer(moment, subprocess.run, (unmount,), {"check": True})
        timer.start()
        ended = in_process(undisturbed, config, log=folder / "log")
        timer.join()
        trial.struck = ended.status == MENDABLE
        if ended.status not in (0, MENDABLE):
            trial.problem = f"ended with {ended.status}: {ended.answer}"
            return trial
        subprocess.run(bind, check=True)
        try:
            return recovered(trial, config, calm, folder / "log")
        finally:
            subprocess.run(unmount, check=True)


RANDOM: dict[str, Callable[[Laboratory, random.Random], Trial | None]] = {
    "driver": driver_killed,
    "damage": file_damaged,
    "disk": disk_fills_up,
    "unmounted": storage_unmounted,
    **{
        f"client-{how}": lambda laboratory, rng, how=how: client_fails(laboratory, rng, how)  # type: ignore[misc]
        for how in ("raise", "diverge", "spoil", "exhaust", "die")
    },
}
"""Trials that choose their moment, by name."""
