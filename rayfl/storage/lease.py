"""Guards the folder of a run or sweep by a lease, so that only one driver works on it at a time.

``lease.json`` names the holder and is renewed regularly. File locks are not needed: network disks and object stores
lack them. docs/commits.md has the rules.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayfl.errors import RunError
from rayfl.naming.texts import matching
from rayfl.storage.files import Storage

FILE = "lease.json"
PROC = Path("/proc")
"""Folder in which Linux describes its processes; without it, less is known of a holder."""
_RENEWALS = 6
"""Number of renewals before a lease would expire."""
_TRIES = 50
_BETWEEN_TRIES_S = 0.1
_ENDED = ("Z", "X")
"""States of an ended process whose parent has not read its exit status yet."""
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this environment variable for the process of a job."""

_log = logging.getLogger("rayfl")


class Holder(BaseModel):
    """The process that holds a lease.

    Attributes:
        token: random token of the lease.
        host: name of the machine.
        pid: process id.
        started: start time of the process in ticks since ``boot``; empty if the system does not report it.
        boot: boot id of the machine; empty if the system does not report it.
        namespace: PID namespace (of a container) that ``pid`` belongs to; empty if the system does not report it.
        heartbeat: time of the last renewal, in seconds since 1970 by the holder's clock.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: Annotated[str, matching(r"[0-9a-f]{32}", "32 hexadecimal digits")]
    host: str
    pid: int = Field(gt=0)
    started: str
    boot: str
    namespace: str
    heartbeat: float

    @classmethod
    def here(cls) -> Holder:
        """Returns a holder for this process, with a new token."""
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_state(os.getpid())[1],
            boot=_boot(),
            namespace=pid_namespace(),
            heartbeat=time.time(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_alive(self) -> bool | None:
        """Returns whether the process is alive; None if that cannot be known from here."""
        if self.host != socket.gethostname():
            return None
        if self.boot and self.boot != _boot():
            return False
        if self.namespace != pid_namespace():
            return None
        state, started = _state(self.pid)
        if not state:
            return None if _exists(self.pid) else False
        return state not in _ENDED and started == self.started


class Lease:
    """The right to work on the folder of a run or sweep, for as long as the ``with`` block lasts.

    Args:
        storage: the folder.
        timeout_s: seconds after the last renewal at which a holder loses its lease if its end cannot be observed.
        waits: whether to wait for the lease of such a holder, as a Ray job does in any case.
    """

    def __init__(self, storage: Storage, timeout_s: float, waits: bool = False) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._waits = waits or _RAY_JOB in os.environ
        self._renewed_every_s = timeout_s / _RENEWALS
        self._mine = Holder.here()
        self._over = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="rayfl-lease", daemon=True)

    def __enter__(self) -> Self:
        """Takes the lease.

        Raises:
            RunError: when another driver holds it, naming that one.
        """
        try:
            self._take()
            self._renewer.start()
        except BaseException:
            # If interrupted right after taking it, a process that lives on (a notebook) would be refused by itself.
            with suppress(RunError):
                self._give_back()
            raise
        return self

    def _take(self) -> None:
        for _ in range(_TRIES):
            try:
                if self._storage.create(FILE, self._content()):
                    return
            except RunError as error:  # it is the first file that a run writes
                raise RunError(f"{error}; is storage_path a folder that you may write, with free space?") from error
            holder = self._awaited(read_lease(self._storage))
            if holder is not None:
                self._refuse_if_alive(holder)
                if self._take_over(holder):
                    _log.info("took over from %s, which is gone", holder)
                    return
            time.sleep(_BETWEEN_TRIES_S)
        raise RunError(f"{self._storage.uri}: other drivers try to take this run at the same time; start only one")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        try:
            self._renewer.join()
        finally:
            # Also after another Ctrl-C while the storage hangs.
            try:
                self._give_back()
            except RunError as problem:
                _log.warning("the lease could not be given back, and runs out by itself: %s", problem)

    def _give_back(self) -> None:
        if self.holds():
            self._storage.delete(FILE)

    def check(self) -> None:
        """Checks that the lease is still held.

        Raises:
            RunError: when it is not: another driver may have continued the run.
        """
        if not self.holds():
            holder = read_lease(self._storage)
            by = f"was taken over by {holder}" if holder is not None else "has lost its lease (the file is gone)"
            raise RunError(
                f"{self._storage.uri}: this run {by}, so this process stops and commits nothing more. What it had "
                "committed stands"
            )

    def holds(self) -> bool:
        """Returns whether the lease is still held; :meth:`check` raises where it is not."""
        holder = read_lease(self._storage)
        return holder is not None and holder.token == self._mine.token

    def _content(self) -> bytes:
        return self._mine.model_copy(update={"heartbeat": time.time()}).model_dump_json(indent=1).encode()

    def _awaited(self, holder: Holder | None) -> Holder | None:
        """Returns the holder after waiting, if at all, for its lease to expire, or for a renewal that shows it in use.

        A holder that cannot be observed is most likely the same job in a pod that was replaced: nobody would try again.
        """
        now, waits = holder, self._waits and holder is not None and holder.is_alive() is None
        while waits and now == holder and (left_s := self._timeout_s - self._age(FILE)) > 0:
            if now is holder:  # the first time
                _log.warning("waits at most %.0f s for the lease of %s to expire", left_s, holder)
            time.sleep(min(left_s, self._renewed_every_s))
            now = read_lease(self._storage)
        return now

    def _refuse_if_alive(self, holder: Holder) -> None:
        lives = holder.is_alive()
        if lives is False:
            return
        age = self._age(FILE)
        if lives or age < self._timeout_s:
            left = f"{self._timeout_s - age:.0f} s and try again (storage.lease_timeout_s)"
            fix = "wait for it, or end that process" if lives else f"if that process is gone, wait {left}"
            raise RunError(
                f"{self._storage.uri}: {holder} is working here (last sign of life {max(age, 0):.0f} s ago); "
                f"{fix}. Two at a time need two names"
            )

    def _age(self, name: str) -> float:
        """Returns the seconds since a file was written, by the storage's clock, since those of machines may differ."""
        probe = f".lease-{self._mine.token}"
        self._storage.write(probe, b"")
        try:
            return self._storage.modified(probe) - self._storage.modified(name)
        except FileNotFoundError:
            return 0.0  # just given back, or just taken: the next try will see
        finally:
            self._storage.delete(probe)

    def _take_over(self, holder: Holder) -> bool:
        """Replaces a dead lease by this one; returns whether it did.

        Of several drivers that see the same dead lease, the one that creates a file named after it may replace it.
        """
        claim = f".lease-after-{holder.token}"
        if not self._storage.create(claim, self._content()):
            claimant = read_lease(self._storage, claim)
            if claimant is not None:
                lives = claimant.is_alive()
                # Replacing a lease takes a moment: a claimant that cannot be observed and is old has crashed.
                if lives is False or (lives is None and self._age(claim) >= self._timeout_s):
                    self._storage.delete(claim)
            return False
        try:
            # Another driver may have taken and returned it since the dead lease was read.
            now = read_lease(self._storage)
            if now is None or now.token != holder.token:
                return False
            self._storage.write(FILE, self._content())
            return True
        finally:
            self._storage.delete(claim)

    def _renew(self) -> None:
        while not self._over.wait(self._renewed_every_s):
            try:
                if not self.holds():
                    return  # `check` says so before the next commit
                self._storage.write(FILE, self._content())
            except (RunError, OSError) as error:
                _log.warning("the lease could not be renewed, next try in %.0f s: %s", self._renewed_every_s, error)


def read_lease(storage: Storage, name: str = FILE) -> Holder | None:
    """Returns the holder of a run's lease; None if there is none.

    Raises:
        RunError: when the file is not a lease.
    """
    try:
        return Holder.model_validate_json(storage.read(name))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(
            f"{storage.uri}/{name} is no lease of rayfl ({error.errors()[0]['msg']}); if no process works on this run, "
            "delete it"
        ) from error


def _boot() -> str:
    return _system("sys/kernel/random/boot_id")


def pid_namespace() -> str:
    """Returns the PID namespace (of a container) of this process; empty if the system does not report it."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """Returns a process's state and its start time in ticks since boot; empty strings if they cannot be read."""
    # The second field, a name in parentheses, may itself have spaces and parentheses.
    fields = _system(f"{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _exists(pid: int) -> bool:
    """Returns whether a process exists, possibly another user's; for systems without /proc."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _system(path: str) -> str:
    try:
        return (PROC / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
