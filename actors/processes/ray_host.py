"""The driver's handle on a host that is a Ray actor: calls, their results, and its death."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.hosting.running_clients import Report
from actors.processes.pool import HostDiedError
from actors.processes.ray_errors import result_of
from actors.processes.transport import Connection, Sender
from rayfl.errors import DeviceLostError

_REPORT_TIMEOUT_S = 10.0
_PING_TIMEOUT_S = 60.0


class RayHost:
    """A host that is a Ray actor.

    Args:
        number: number of the host.
        actor: handle of its actor, which may still be starting.

    Attributes:
        started: Ray's handle of the description that the actor returns once it has started.
        description: description of the actor; empty until it has started.
    """

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.started = actor.describe.remote()
        self.description: dict[str, Any] = {}
        self._connection = Connection()

    def finish_start(self, position: int, sender: Sender) -> None:
        """Reads the description of the started actor, and tries whether it shares memory with the driver.

        Args:
            position: position of the host, for errors.
            sender: sender of the driver.

        Raises:
            HostDiedError: when the actor is dead.
            ResourceError: when the actor could not be set up.
        """
        self.description = result_of(self.started, position)
        if self.description["node_id"] == ray.get_runtime_context().get_node_id():
            self._connection.handshake(
                sender, lambda greeting: result_of(self.actor.handshake.remote(greeting), position)
            )

    def submit(self, method: str, *args: Any) -> Any:
        """Starts a method; returns a handle for :meth:`result`."""
        freed = self._connection.freed() if method == "run" else {}
        handle = getattr(self.actor, method).remote(*self._connection.arguments(args), **freed)
        self._connection.sent(handle, args)
        return handle

    def submit_apart(self, method: str, *args: Any) -> tuple[Any, Any]:
        """Starts a method with two results; returns handles of both."""
        freed = self._connection.freed() if method == "run_apart" else {}
        call = getattr(self.actor, method).options(num_returns=2)
        first, second = call.remote(*self._connection.arguments(args), **freed)
        self._connection.sent(first, args)
        return first, second

    def result(self, handle: Any, position: int) -> Any:
        """Returns the result of a method.

        Args:
            handle: handle of the call.
            position: position of the host, for errors.

        Raises:
            HostDiedError: when the actor is dead.
        """
        try:
            value = result_of(handle, position)
        except BaseException as error:
            self._connection.failed(handle)
            if isinstance(error.__cause__, DeviceLostError):
                ray.kill(self.actor)  # a new process can compute where this one cannot any more
            raise
        try:
            return self._connection.received(handle, value)
        except OSError as error:
            raise HostDiedError(position, f"its answer cannot be read any more: {error}") from None

    def doing(self) -> Report | None:
        """Returns what the actor is doing; None if it does not answer, because it hangs or is dead."""
        try:
            report: Report = ray.get(self.actor.doing.remote(), timeout=_REPORT_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return None
        return report

    def forget(self) -> None:
        """Discards the results of all earlier calls, some of which may still be running."""
        self._connection.forget()


def abandon_work(hosts: Sequence[RayHost]) -> list[RayHost]:
    """Has hosts give up what they run; returns those that answer within a minute, even while they train or commit."""
    calls = [host.actor.abandon.remote() for host in hosts]
    answered = ray.wait(calls, num_returns=len(calls), timeout=_PING_TIMEOUT_S)[0]
    return [host for host, call in zip(hosts, calls, strict=True) if call in answered and not _failed(call)]


def _failed(handle: Any) -> bool:
    """Returns whether a call that has ended has failed."""
    try:
        ray.get(handle)
    except RayError:
        return True
    return False
