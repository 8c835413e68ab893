"""The driver's end of one host that is a Ray actor: calls, and how trees reach it and come back."""

from __future__ import annotations

import uuid
import weakref
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.hosting.at_work import Report
from actors.processes.client_actor import Reply
from actors.processes.pool import HostDiedError
from actors.processes.ray_errors import result_of
from actors.processes.shared_memory import LEAST_BYTES, Inbox, Outbox, Parcel
from rayfl.errors import DeviceLostError
from rayfl.params import Tree, leaves

_REPORT_TIMEOUT_S = 10.0


class Broadcast:
    """One tree for all hosts, by whichever way it reaches each of them soonest; made ready when first asked for.

    Args:
        tree: with NumPy arrays.
        outbox: for hosts on this machine.
    """

    def __init__(self, tree: Tree, outbox: Outbox) -> None:
        self._tree, self._outbox = tree, outbox
        self._small = sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, np.ndarray)) < LEAST_BYTES
        self._parcel: Parcel | None = None
        self._packed = False
        self._reference: Any = None

    def argument(self, near: bool) -> Any:
        """What to pass to an actor: the tree itself, a parcel, or a reference to Ray's object store.

        Args:
            near: whether the actor reads this process's parcels.
        """
        if self._small:
            return self._tree
        if near and not self._packed:
            self._packed, self._parcel = True, self._outbox.pack(self._tree)
            if self._parcel is not None:
                # The calls that read it hold this object, each until it has been answered.
                self._freeing = weakref.finalize(self, self._outbox.free, self._parcel.serial)
        if near and self._parcel is not None:
            return self._parcel
        if self._reference is None:
            self._reference = ray.put(self._tree)
        return self._reference

    def abandon(self) -> None:
        """Somebody may go on reading the parcel: nothing else is ever written to its memory."""
        if self._parcel is not None and self._freeing.detach():
            weakref.finalize(self, self._outbox.give_up, self._parcel.serial)


class RayHost:
    """One host.

    Args:
        number: what it is called by.
        actor: a handle of its actor, which may still be starting.

    Attributes:
        started: handle of the description that the actor gives when it has started.
        description: this.
    """

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.started = actor.describe.remote()
        self.description: dict[str, Any] = {}
        self._near = False
        self._inbox = Inbox()
        self._reading: dict[Any, Broadcast] = {}

    def arrive(self, position: int, outbox: Outbox) -> None:
        """Takes note of what the actor says of itself, and of whether it and this process read each other's parcels.

        Args:
            position: the host's, for errors.
            outbox: this process's.

        Raises:
            HostDiedError: when it is gone.
            ResourceError: when it could not be set up.
        """
        self.description = result_of(self.started, position)
        if self.description["node_id"] != ray.get_runtime_context().get_node_id():
            return
        # Containers may share a node without sharing processes.
        token = np.frombuffer(uuid.uuid4().bytes, np.uint8)
        if (greeting := outbox.pack(token, least=1)) is None:
            return
        answer = result_of(self.actor.meet.remote(greeting), position)
        outbox.free(greeting.serial)
        try:
            self._near = answer is not None and np.array_equal(self._inbox.open(answer), token)
        except OSError:
            return

    def submit(self, method: str, *args: Any) -> Any:
        """Starts a method; returns a handle for :meth:`result`."""
        given = [arg.argument(self._near) if isinstance(arg, Broadcast) else arg for arg in args]
        freed = {"freed": self._inbox.freed()} if self._near and method == "run" else {}
        handle = getattr(self.actor, method).remote(*given, **freed)
        for broadcast in (arg for arg in args if isinstance(arg, Broadcast)):
            self._reading[handle] = broadcast
        return handle

    def result(self, handle: Any, position: int) -> Any:
        """What a method returned.

        Args:
            handle: of the call.
            position: the host's, for errors.

        Raises:
            HostDiedError: when it is gone.
        """
        broadcast = self._reading.pop(handle, None)
        try:
            value = result_of(handle, position)
        except BaseException as error:
            if broadcast is not None:
                broadcast.abandon()
            if isinstance(error.__cause__, DeviceLostError):
                ray.kill(self.actor)  # a new process can compute where this one cannot any more
            raise
        if not isinstance(value, Reply):
            return value
        if broadcast is not None and not value.done:
            broadcast.abandon()
        if not isinstance(value.value, Parcel):
            return value.value
        try:
            return self._inbox.open(value.value)
        except OSError as error:
            raise HostDiedError(position, f"its answer cannot be read any more: {error}") from None

    def doing(self) -> Report | None:
        """What its actor does just now; None if it does not say, as one that has stopped or is gone."""
        try:
            report: Report = ray.get(self.actor.doing.remote(), timeout=_REPORT_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return None
        return report

    def forget(self) -> None:
        """Nobody will ask for the results of calls made so far; some may still be running."""
        for broadcast in self._reading.values():
            broadcast.abandon()
        self._reading = {}
