"""Moves trees between the driver and its actors: within a call, in shared memory, or through Ray's object store.

Shared memory is used if the driver and the actor are processes of one machine that can open each other's memory. They
try it once (:meth:`Connection.handshake`). Trees that do not fit go through the object store.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

from actors.processes.shared_memory import LEAST_BYTES, Inbox, Outbox, Parcel
from rayfl.params import Tree, leaves


class Reply(NamedTuple):
    """The answer of a call, for a driver that reads the actor's shared memory.

    Attributes:
        value: the result, or the parcel that contains it.
        done: whether nothing in the actor refers to the broadcast any more.
    """

    value: Any
    done: bool


class Broadcast:
    """One tree for all actors, sent to each by the fastest way: in the call, in shared memory or in the object store.

    Parcels and objects are made when they are first needed.

    Args:
        tree: tree with NumPy arrays.
        outbox: memory for actors on this machine.
    """

    def __init__(self, tree: Tree, outbox: Outbox) -> None:
        self._tree, self._outbox = tree, outbox
        self._small = sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, np.ndarray)) < LEAST_BYTES
        self._parcel: Parcel | None = None
        self._packed = False
        self._reference: Any = None

    def argument(self, near: bool) -> Any:
        """Returns the argument of a call: the tree itself, a parcel, or a reference to Ray's object store.

        Args:
            near: whether the actor can open this process's shared memory.
        """
        if self._small:
            return self._tree
        if near and not self._packed:
            self._packed, self._parcel = True, self._outbox.pack(self._tree)
            if self._parcel is not None:
                # Each call that reads the parcel refers to this object until it is answered.
                self._freeing = weakref.finalize(self, self._outbox.free, self._parcel.serial)
        if near and self._parcel is not None:
            return self._parcel
        if self._reference is None:
            self._reference = ray.put(self._tree)
        return self._reference

    def abandon(self) -> None:
        """Never reuses the parcel's memory, because an actor may still read it."""
        if self._parcel is not None and self._freeing.detach():
            weakref.finalize(self, self._outbox.give_up, self._parcel.serial)


class Sender:
    """The driver's shared memory for messages to actors.

    Args:
        limit: maximum bytes of shared memory.
    """

    def __init__(self, limit: int) -> None:
        self._outbox = Outbox(limit)

    def put(self, tree: Tree) -> Broadcast:
        """Wraps a tree with NumPy arrays as an argument for calls to any number of actors."""
        return Broadcast(tree, self._outbox)

    def greeting(self, token: np.ndarray) -> Parcel | None:
        """Returns a test message in shared memory; None if there is no shared memory."""
        return self._outbox.pack(token, least=1)

    def reclaim(self, greeting: Parcel) -> None:
        """Frees the memory of a test message that was answered."""
        self._outbox.free(greeting.serial)

    def close(self) -> None:
        """Releases the memory."""
        self._outbox = Outbox(0)


class Connection:
    """The driver's end of the connection to one actor."""

    def __init__(self) -> None:
        self._near = False
        self._inbox = Inbox()
        self._reading: dict[Any, Broadcast] = {}

    def handshake(self, sender: Sender, ask: Callable[[Parcel], Parcel | None]) -> None:
        """Tries whether the driver and an actor of its node can open each other's shared memory.

        Containers on one node may not see each other's processes.

        Args:
            sender: sender of the driver.
            ask: sends a test message to the actor and returns its answer (:meth:`ActorEnd.handshake`).
        """
        token = np.frombuffer(uuid.uuid4().bytes, np.uint8)
        if (greeting := sender.greeting(token)) is None:
            return
        answer = ask(greeting)
        sender.reclaim(greeting)
        try:
            self._near = answer is not None and np.array_equal(self._inbox.open(answer), token)
        except OSError:
            return

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments of a call in the form in which they are sent."""
        return [arg.argument(self._near) if isinstance(arg, Broadcast) else arg for arg in args]

    def freed(self) -> dict[str, tuple[int, ...]]:
        """Returns the keyword argument ``freed`` for calls with large results: segments that are no longer read."""
        return {"freed": self._inbox.freed()} if self._near else {}

    def sent(self, handle: Any, args: Sequence[Any]) -> None:
        """Keeps the broadcasts that a call reads until it is answered.

        Args:
            handle: handle of the call.
            args: arguments as given to :meth:`arguments`.
        """
        for broadcast in (arg for arg in args if isinstance(arg, Broadcast)):
            self._reading[handle] = broadcast

    def failed(self, handle: Any) -> None:
        """Notes that a call has failed: the actor may still read its broadcast."""
        if (broadcast := self._reading.pop(handle, None)) is not None:
            broadcast.abandon()

    def received(self, handle: Any, value: Any) -> Any:
        """Returns the result of a call.

        Args:
            handle: handle of the call.
            value: answer of the actor.

        Raises:
            OSError: when the result is in memory that cannot be opened any more.
        """
        broadcast = self._reading.pop(handle, None)
        if not isinstance(value, Reply):
            return value
        if broadcast is not None and not value.done:
            broadcast.abandon()
        return self._inbox.open(value.value) if isinstance(value.value, Parcel) else value.value

    def forget(self) -> None:
        """Discards the results of all earlier calls, some of which may still be running."""
        for handle in list(self._reading):
            self.failed(handle)


class ActorEnd:
    """An actor's end of the connection to the driver.

    Args:
        limit: maximum bytes of shared memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inbox, self._outbox = Inbox(), Outbox(limit)

    @property
    def room(self) -> int:
        """Maximum bytes of a result in shared memory, where two results must fit at a time."""
        return self._limit // 2

    def handshake(self, greeting: Parcel) -> Parcel | None:
        """Returns the driver's test message if this process can open the driver's shared memory; else None."""
        try:
            return self._outbox.pack(np.array(self._inbox.open(greeting)), least=1)
        except OSError:
            return None

    def answered(self, work: Callable[[Tree], Any], broadcast: Tree | Parcel, freed: Sequence[int] | None) -> Any:
        """Computes the answer of a call, in the form in which it is sent.

        Args:
            work: function of the broadcast tree.
            broadcast: tree or parcel as received.
            freed: segments of earlier results that the driver no longer reads; None if it does not read this process's
                memory.
        """
        if freed is None:
            assert not isinstance(broadcast, Parcel)
            return work(broadcast)
        for serial in freed:
            self._outbox.free(serial)
        if isinstance(broadcast, Parcel):
            self._inbox.freed()  # drops the notes of earlier broadcasts, some of them in the same memory
            result = work(self._inbox.open(broadcast))
            done = broadcast.serial in self._inbox.freed()
        else:
            result, done = work(broadcast), True
        return Reply(self._outbox.pack(result) or result, done)

    def reset(self) -> None:
        """Starts with new memory, because earlier results may never be read and freed."""
        self._outbox = Outbox(self._limit)
