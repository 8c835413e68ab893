"""What a trial is: an experiment, a fault, the same command again, and the comparison with an undisturbed run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rayfl
from cluster.run import run
from rayfl.errors import RayflError
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from rayfl.tracking.callback import RunInfo
from tests.support.experiments import assert_same, outcome, small_experiment

_FORK = multiprocessing.get_context("fork")
_LONGEST_S = 240.0
_ENDING_S = 30.0
KILLED = -signal.SIGKILL
MENDABLE = 2
"""Exit status of a process that ended with an error of rayfl's own, which says what to do."""


@dataclass
class Trial:
    """What became of one trial.

    Attributes:
        fault: its kind.
        detail: where and when.
        struck: whether the fault happened before the run was over.
        recover_s: seconds from the fault, or the start of the second command, until the run went on; None where it had
            nothing left to do.
        problem: what went wrong; empty if the results are those of the undisturbed run.
    """

    fault: str
    detail: str = ""
    struck: bool = True
    recover_s: float | None = None
    problem: str = ""


@dataclass
class Ended:
    """A process that ran an experiment.

    Attributes:
        status: its exit status, negative for a signal.
        seconds: how long it took.
        answer: what it sent back.
    """

    status: int
    seconds: float
    answer: Any


def in_process(work: Callable[..., Any], *arguments: Any, kill_after_s: float | None = None, log: Path) -> Ended:
    """Calls a function in a child of this process, which has everything imported and nothing computed.

    Args:
        work: what to call.
        *arguments: its arguments.
        kill_after_s: when to end it with ``kill -9``.
        log: where its output goes.
    """
    mine, its = _FORK.Pipe(duplex=False)
    begun = time.monotonic()
    process = _FORK.Process(target=_child, args=(its, log, work, arguments))
    process.start()
    its.close()
    answer = None
    if mine.poll(_LONGEST_S if kill_after_s is None else kill_after_s):
        with suppress(EOFError):
            answer = mine.recv()
        process.join(_ENDING_S)
    elif kill_after_s is None:
        answer = f"took more than {_LONGEST_S:g} s"
    process.kill()
    process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, time.monotonic() - begun, answer)


def _child(pipe: Any, log: Path, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    # Ray makes a session's processes die with the one that started them; the child must not share this one's group.
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    try:
        pipe.send(work(*arguments))
    except RayflError as error:
        pipe.send(str(error))
        sys.exit(MENDABLE)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
        sys.exit(1)


class Moments(rayfl.Callback):
    """When the run went on."""

    def __init__(self) -> None:
        self.on: float | None = None
        self.failures: list[float] = []

    def on_start(self, run: RunInfo) -> None:
        self.on = time.monotonic()

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.failures.append(time.monotonic())


def experiment(folder: Path, method: str, rounds: int = 4, **cluster: Any) -> dict[str, Any]:
    """The experiment of a trial: real data, tiny."""
    config = small_experiment(folder, "run", method, **({"backend": "inline"} | cluster))
    return config | {"train": config["train"] | {"rounds": rounds}}


def undisturbed(config: dict[str, Any]) -> None:
    """Runs an experiment."""
    run(config)


def again(config: dict[str, Any], calm: Path) -> tuple[float | None, str]:
    """Runs an experiment once more; returns the time until it went on, and what differs from the undisturbed run."""
    begun, moments = time.monotonic(), Moments()
    run(config, callbacks=[moments])
    return (None if moments.on is None else moments.on - begun), difference(config, calm)


def difference(config: dict[str, Any], calm: Path) -> str:
    """What differs from the undisturbed run; empty if nothing does, to the bit."""
    folder = Path(config["storage_path"]) / config["name"]
    try:
        assert_same(outcome(calm), outcome(folder))
    except AssertionError as error:
        return f"another result: {str(error).splitlines()[0] if str(error) else error!r}"
    return "; ".join(verify(Storage(str(folder))).problems)


def recovered(trial: Trial, config: dict[str, Any], calm: Path, log: Path) -> Trial:
    """The last part of every trial that ended its process: the same command again, in a new one."""
    ended = in_process(again, config, calm, log=log)
    if ended.status != 0 or not isinstance(ended.answer, tuple):
        trial.problem = f"the same command ended with {ended.status}: {ended.answer}"
    else:
        trial.recover_s, trial.problem = ended.answer
    return trial
