"""Trials on a real Ray of two actors: processes killed and stopped, and objects lost on their way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from chaos_inline import Laboratory
from chaos_trials import KILLED, MENDABLE, Moments, Trial, difference, experiment, in_process, recovered
from ray._private import worker
from ray.exceptions import ObjectLostError

from actors.processes import ray_errors
from cluster.rounds.session import start_local
from cluster.run import run
from rayfl.tracking.callback import RunInfo

_METHOD = "scaffold"
_EPOCHS = 20
"""Rounds of some tenths of a second: there is something to interrupt."""
_DEADLINE_S = 8.0


class Saboteur(Moments):
    """Does harm a moment after a round (0: after the start).

    Args:
        after: the round.
        delay_s: the moment, in seconds.
        harm: what to do, with the process ids of the actors.
    """

    def __init__(self, after: int, delay_s: float, harm: Callable[[list[int]], None]) -> None:
        super().__init__()
        self._after, self._delay_s, self._harm = after, delay_s, harm
        self._pids: list[int] = []
        self.struck_at: float | None = None

    def on_start(self, run: RunInfo) -> None:
        super().on_start(run)
        self._pids = [int(host["pid"]) for host in run.hosts]
        self._plan(0)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._plan(rounds_completed)

    def _plan(self, rounds_completed: int) -> None:
        if rounds_completed == self._after and self.struck_at is None:
            self.struck_at = time.monotonic() + self._delay_s
            timer = threading.Timer(self._delay_s, self._harm, (self._pids,))
            timer.daemon = True
            timer.start()


def ray_experiment(folder: Path, actors: int = 2) -> dict[str, Any]:
    """The experiment of a trial on Ray; ``actors=0``: the undisturbed one, without Ray."""
    places = {"num_actors": actors, "startup_timeout_s": 240} if actors else {}
    config = experiment(folder, _METHOD, **({"backend": "ray", **places} if actors else {}))
    config["model"] = {"name": "two_nn", "hidden": [512]}  # too large to travel within a call
    return config | {"train": config["train"] | {"local_epochs": _EPOCHS}, "max_failures": 10}


def _signal(number: int, chosen: Callable[[list[int]], list[int]]) -> Callable[[list[int]], None]:
    def harm(pids: list[int]) -> None:
        for pid in chosen(pids):
            os.kill(pid, number)

    return harm


def _raylet() -> int:
    return int(worker._global_node.all_processes["raylet"][0].process.pid)


def _pause_raylet(pids: list[int]) -> None:
    os.kill(_raylet(), signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(_raylet(), signal.SIGCONT)


class _LossyRay:
    """The module ``ray`` where answers are asked for, with one of them lost on its way."""

    def get(self, reference: Any, **options: Any) -> Any:
        ray_errors.ray = ray
        raise ObjectLostError(reference.hex(), None, "")

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)


def _lose_answer(pids: list[int]) -> None:
    ray_errors.ray = _LossyRay()  # type: ignore[assignment]


HARMS: dict[str, tuple[str, Callable[[random.Random], Callable[[list[int]], None]]]] = {
    "actor": ("an actor killed", lambda rng: _signal(signal.SIGKILL, lambda pids: [rng.choice(pids)])),
    "actors": ("all actors killed", lambda rng: _signal(signal.SIGKILL, lambda pids: pids)),
    "hang": ("an actor stops answering", lambda rng: _signal(signal.SIGSTOP, lambda pids: [rng.choice(pids)])),
    "pause": ("transfers held up for 2 s (raylet stopped)", lambda rng: _pause_raylet),
    "lost": ("answer of an actor lost, injected", lambda rng: _lose_answer),
}
"""What a run survives by itself."""
FAULTS = (*HARMS, "client-die", "client-hang", "driver", "raylet")


def ray_trial(laboratory: Laboratory, rng: random.Random, kind: str) -> Trial:
    """One trial, with a Ray of its own."""
    folder = laboratory.folder()
    calm = laboratory.once("ray", lambda place: ray_experiment(place, actors=0))
    config = ray_experiment(folder)
    config["cluster"]["shared_memory"] = rng.choice([0, "256MiB"])
    log = folder / "log"
    if kind in ("driver", "raylet"):
        return _ended_by(kind, rng, config, calm, log)
    moment = rng.randrange(4), rng.uniform(0.0, 0.4)
    config["clients"] = {"deadline_s": _DEADLINE_S}
    if kind.startswith("client-"):
        failing = [[rng.randrange(4), client] for client in range(5)]
        how = kind.removeprefix("client-")
        trial = Trial(
            {"die": "client's actor killed while it trains", "hang": "client hangs"}[how], f"{failing}, 2 actors"
        )
        marker = folder / "once"
        config["algorithm"] = {
            "name": "tests.support.faulty:Faulty",
            "failing": failing,
            "how": how,
            "marker": str(marker),
        }
        ended = in_process(_sabotaged, config, calm, kind, 0, moment, log=log)
        trial.struck = marker.exists()
    else:
        trial = Trial(HARMS[kind][0], f"{moment[1]:.2f} s after round {moment[0]}, 2 actors")
        ended = in_process(_sabotaged, config, calm, kind, rng.randrange(1 << 30), moment, log=log)
    if ended.status != 0 or not isinstance(ended.answer, tuple):
        trial.problem = f"ended with {ended.status}: {ended.answer}"
        return trial
    trial.recover_s, struck, trial.problem = ended.answer
    trial.struck = trial.struck and struck
    return trial


def _sabotaged(
    config: dict[str, Any], calm: Path, kind: str, seed: int, moment: tuple[int, float]
) -> tuple[float | None, bool, str]:
    """A run that is disturbed; the seconds until it went on, whether it was in time, and what differs."""
    start_local(num_cpus=4)
    try:
        harm = HARMS[kind][1](random.Random(seed)) if kind in HARMS else lambda pids: None
        saboteur = Saboteur(*moment, harm)
        run(config, callbacks=[saboteur])
        over = time.monotonic()
    finally:
        ray.shutdown()
    begun, went_on = saboteur.struck_at, saboteur.failures
    struck = kind not in HARMS or (begun is not None and begun < over and (kind != "lost" or bool(went_on)))
    recover_s = went_on[0] - begun if kind in HARMS and went_on and begun is not None else None
    if kind == "hang" and recover_s is not None:
        recover_s -= _DEADLINE_S
    return recover_s, struck, difference(config, calm)


def _ended_by(kind: str, rng: random.Random, config: dict[str, Any], calm: Path, log: Path) -> Trial:
    """The driver, or Ray's own process on its node, is killed; the same command is run again."""
    moment = rng.randrange(4), rng.uniform(0.0, 0.4)
    named = {"driver": "driver killed, with its actors", "raylet": "raylet killed"}[kind]
    trial = Trial(named, f"{moment[1]:.2f} s after round {moment[0]}, 2 actors")
    ended = in_process(_killed, config, kind, moment, log=log)
    trial.struck = ended.status != 0
    # A driver that loses its node's raylet is ended by Ray, with status 1 and without asking anybody.
    expected = (0, KILLED) if kind == "driver" else (0, 1, MENDABLE)
    if ended.status not in expected:
        trial.problem = f"ended with {ended.status}: {ended.answer}"
        return trial
    return recovered(trial, config, calm, log)


def _killed(config: dict[str, Any], kind: str, moment: tuple[int, float]) -> None:
    start_local(num_cpus=4)
    run(config, callbacks=[Saboteur(*moment, lambda pids: os.kill(_victim(kind), signal.SIGKILL))])


def _victim(kind: str) -> int:
    return os.getpid() if kind == "driver" else _raylet()
