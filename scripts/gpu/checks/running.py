"""Runs checks in processes of their own, with limits of time, and keeps what they answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LEAST_S = 5.0
"""With less time left a check is not started."""
_GRACE_S = 3.0
"""How long a process that is ended may take to say where it was, and then to be gone."""


class SkippedError(Exception):
    """The check cannot be made here; the message says why."""


@dataclass
class Record:
    """What one check finds, on disk from the moment it is noted: a process that is killed leaves what it had.

    Attributes:
        path: the file.
        found: values by name.
        goals: what was aimed at, see :meth:`goal`.
    """

    path: Path
    found: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        """Keeps a value."""
        self.found[name] = value
        self._write("failed", "the process ended before the check did")

    def goal(self, what: str, wanted: str, found: float, met: bool) -> None:
        """Keeps what was aimed at, and what came of it.

        Args:
            what: is measured.
            wanted: in words.
            found: the measured number.
            met: whether it is as wanted.
        """
        self.goals.append({"goal": what, "wanted": wanted, "found": found, "met": met})
        self._write("failed", "the process ended before the check did")

    def end(self, status: str, reason: str = "") -> None:
        """Notes how the check ended: ok, skipped or failed, with the reason."""
        self._write(status, reason)

    def _write(self, status: str, reason: str) -> None:
        answer = {"status": status, "reason": reason, "found": self.found, "goals": self.goals}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(answer, default=str))
        new.replace(self.path)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: unique in its part.
        limit_s: seconds after which its process is ended.
        what: a line for people.
        work: does it.
    """

    name: str
    limit_s: float
    what: str
    work: Callable[[Record], None]


def run_checks(
    checks: Sequence[Check], command: Sequence[str], out: Path, name: str, within_s: float, together: int = 1
) -> dict[str, dict[str, Any]]:
    """Runs checks one after the other, or several at a time.

    Args:
        checks: which.
        command: runs one check if ``--check NAME --out FILE`` is appended.
        out: folder of the answers and logs.
        name: of the file of answers, without its ending.
        within_s: seconds for all together; a check may take what is left.
        together: how many run at a time: their seconds then mean nothing.

    Returns:
        The answers by check, with the seconds it took.
    """
    out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, dict[str, Any]] = {}
    ends, writing = time.monotonic() + within_s, threading.Lock()

    def run(check: Check) -> None:
        limit = min(check.limit_s, ends - time.monotonic())
        begun = time.monotonic()
        if limit < _LEAST_S:
            answer = {"status": "skipped", "reason": "no time was left", "found": {}, "goals": []}
        else:
            answer = _run(check, command, out, limit)
        with writing:
            answers[check.name] = {**answer, "seconds": round(time.monotonic() - begun, 1)}
            (out / f"{name}.json").write_text(json.dumps(answers, indent=1))
        first = (answer["reason"].strip().splitlines() or [""])[-1]
        print(f"{answer['status']:8} {check.name:24} {answers[check.name]['seconds']:6} s  {first[:150]}", flush=True)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(run, checks))
    return answers


def _run(check: Check, command: Sequence[str], out: Path, limit_s: float) -> dict[str, Any]:
    file = out / f"answer-{check.name}.json"
    file.unlink(missing_ok=True)
    with (out / f"{check.name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--check", check.name, "--out", str(file)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        try:
            ended = f"exit code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"no end within {limit_s:.0f} s, its log says where it was"
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        # Its children go with it: the group is this process's own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that waits for a driver which does not answer cannot be ended: the next check does not wait for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if not file.exists():
        return {"status": "failed", "reason": f"no answer: {ended}", "found": {}, "goals": []}
    answer: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    if answer["status"] == "failed" and not ended.endswith("code 0"):
        answer["reason"] = f"{answer['reason']} ({ended})"
    return answer
