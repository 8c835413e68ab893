"""Folders of trials in one process, and trials at every boundary of a commit: process killed, or disk failing."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_boundaries import Boundaries, count, fail_from, kill_at
from chaos_trials import KILLED, MENDABLE, Trial, experiment, in_process, recovered, undisturbed

import rayfl
from cluster.run import run

METHODS = ("scaffold", "superfed-mm", "fedphp", "floco", "ditto", "fedpac")
"""Methods whose clients have states, one with several calls a round."""
BOUNDARIES = "process killed at a boundary of a write, fsync, rename or delete"
_SHORT = 2
"""Rounds of the experiment whose every boundary is tried: a first commit, and one that replaces another."""
_LEAST = 30
"""Boundaries of a commit: it writes five files and more, each with eight."""


@dataclass
class Laboratory:
    """Folders for trials, and the undisturbed runs they are compared with.

    Args:
        root: an empty folder.
    """

    root: Path
    _seconds: dict[str, float] = field(default_factory=dict)
    _noted: dict[str, Any] = field(default_factory=dict)
    _trials: int = 0
    _last: Path | None = None

    def warm_up(self) -> None:
        """Imports what a run imports on its way, so that the processes of trials need not."""
        folder = self.folder()
        ended = in_process(_modules, experiment(folder, "scaffold"), log=folder / "log")
        for name in ended.answer if ended.status == 0 else ():
            with suppress(Exception):
                importlib.import_module(name)

    def folder(self) -> Path:
        """A new folder."""
        self._trials += 1
        self._last = self.root / f"trial-{self._trials:05d}"
        self._last.mkdir()
        return self._last

    def tidy(self, keep: bool) -> None:
        """Deletes the newest folder, unless somebody wants to look at it."""
        if self._last is not None and not keep:
            shutil.rmtree(self._last)
        self._last = None

    def calm(self, method: str, rounds: int = 4) -> tuple[Path, float]:
        """The folder of a method's undisturbed run, and the seconds it took."""
        folder = self.once(f"{method}-{rounds}", lambda place: experiment(place, method, rounds))
        return folder, self._seconds[f"{method}-{rounds}"]

    def once(self, name: str, config: Callable[[Path], dict[str, Any]]) -> Path:
        """The folder of an undisturbed run, made at the first call."""
        folder = self.root / f"calm-{name}"
        if name not in self._seconds:
            folder.mkdir()
            ended = in_process(undisturbed, config(folder), log=folder / "log")
            if ended.status != 0:
                raise RuntimeError(f"the undisturbed run {name} failed: {ended.answer}")
            self._seconds[name] = ended.seconds
        return folder / "run"

    def noted(self, name: str, find: Callable[[Path], Any]) -> Any:
        """What is found in a new folder at the first call."""
        if name not in self._noted:
            place = self.root / f"noted-{len(self._noted)}"
            place.mkdir()
            self._noted[name] = find(place)
        return self._noted[name]


def _modules(config: dict[str, Any]) -> list[str]:
    undisturbed(config)
    return sorted(sys.modules)


def run_with(boundaries: Boundaries, config: dict[str, Any]) -> None:
    """Runs an experiment whose calls of the system are wrapped."""
    boundaries.install()
    undisturbed(config)


class _SecondCommit(rayfl.Callback):
    """Notes at which boundary the first commit was done."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self.begun = 0

    def on_commit(self, rounds_completed: int) -> None:
        if rounds_completed == 1:
            self.begun = len(self._boundaries.names)


def counted(config: dict[str, Any]) -> tuple[list[str], int]:
    """The names of the boundaries of an experiment, and how many there were when its first commit was done."""
    boundaries = count()
    boundaries.install()
    second = _SecondCommit(boundaries)
    run(config, callbacks=[second])
    return boundaries.names, second.begun


def boundary_names(laboratory: Laboratory) -> tuple[list[str], int]:
    """The boundaries of the short experiment, in order, and the number of those before its last commit."""
    folder = laboratory.folder()
    ended = in_process(counted, experiment(folder, "scaffold", _SHORT), log=folder / "log")
    if ended.status != 0:
        raise RuntimeError(f"the boundaries could not be counted: {ended.answer}")
    names, begun = ended.answer
    if begun == 0 or len(names) - begun < _LEAST:
        raise RuntimeError(f"of a commit only {len(names) - begun} boundaries were seen: calls are no longer wrapped")
    return names, begun


def killed_at_boundary(laboratory: Laboratory, number: int, name: str) -> Trial:
    """The process is killed at one boundary of a system call."""
    trial = Trial(BOUNDARIES, f"boundary {number}, {name}")
    calm, _ = laboratory.calm("scaffold", _SHORT)
    folder = laboratory.folder()
    config = experiment(folder, "scaffold", _SHORT)
    ended = in_process(run_with, kill_at(number), config, log=folder / "log")
    if ended.status != KILLED:
        trial.problem = f"ended with {ended.status} where it should have been killed: {ended.answer}"
        return trial
    return recovered(trial, config, calm, folder / "log")


def failed_at_boundary(laboratory: Laboratory, number: int, name: str, code: int, once: bool) -> Trial:
    """A call fails, once or from then on, and with it the run; then the disk is well again."""
    label = {errno.ENOSPC: "disk full", errno.EROFS: "storage read-only", errno.EIO: "input/output error"}[code]
    trial = Trial(f"{label}, injected", f"boundary {number}, {name}{', once' if once else ''}")
    calm, _ = laboratory.calm("scaffold", _SHORT)
    folder = laboratory.folder()
    config = experiment(folder, "scaffold", _SHORT)
    ended = in_process(run_with, fail_from(number, code, once), config, log=folder / "log")
    # The lease is given back at the very end: that this fails is a warning.
    if ended.status not in (0, MENDABLE):
        trial.problem = f"ended with {ended.status}: {ended.answer}"
        return trial
    if ended.status == MENDABLE and os.strerror(code) not in str(ended.answer):
        trial.problem = f"the message does not say why: {ended.answer}"
        return trial
    return recovered(trial, config, calm, folder / "log")
