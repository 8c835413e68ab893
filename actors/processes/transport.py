"""Moves trees between the driver and its actors: within a call, in shared memory, or through Ray's object store.

Shared memory needs the driver and the actor to be processes of one machine that can open each other's memory; they try
it once (:meth:`Connection.handshake`). What finds no room there goes through the object store.
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
    """The answer of a call to a driver that reads parcels.

    Attributes:
        value: the result, or the parcel that it is in.
        done: whether nothing in the actor refers to the broadcast any more.
    """

    value: Any
    done: bool


class Broadcast:
    """One tree for all actors, sent to each by the fastest way: inline, shared memory or object store; prepared lazily.

    Args:
        tree: with NumPy arrays.
        outbox: for actors on this machine.
    """

    def __init__(self, tree: Tree, outbox: Outbox) -> None:
        self._tree, self._outbox = tree, outbox
        self._small = sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, np.ndarray)) < LEAST_BYTES
        self._parcel: Parcel | None = None
        self._packed = False
        self._reference: Any = None

    def argument(self, near: bool) -> Any:
        """Returns what to pass to an actor: the tree itself, a parcel, or a reference to Ray's object store.

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
        """Keeps the parcel's memory from being written again: an actor may go on reading it."""
        if self._parcel is not None and self._freeing.detach():
            weakref.finalize(self, self._outbox.give_up, self._parcel.serial)


class Sender:
    """The driver's memory for what it sends.

    Args:
        limit: bytes of shared memory that it may use.
    """

    def __init__(self, limit: int) -> None:
        self._outbox = Outbox(limit)

    def put(self, tree: Tree) -> Broadcast:
        """Returns a tree with NumPy arrays as an argument for calls to any number of actors."""
        return Broadcast(tree, self._outbox)

    def greeting(self, token: np.ndarray) -> Parcel | None:
        """Returns a small message in shared memory; None where none is to be had."""
        return self._outbox.pack(token, least=1)

    def reclaim(self, greeting: Parcel) -> None:
        """Has the memory of a greeting that was answered used again."""
        self._outbox.free(greeting.serial)

    def close(self) -> None:
        """Lets go of the memory."""
        self._outbox = Outbox(0)


class Connection:
    """The driver's end of the connection to one actor."""

    def __init__(self) -> None:
        self._near = False
        self._inbox = Inbox()
        self._reading: dict[Any, Broadcast] = {}

    def handshake(self, sender: Sender, ask: Callable[[Parcel], Parcel | None]) -> None:
        """Finds out whether the driver and an actor of its node read each other's parcels.

        Containers may share a node without sharing processes.

        Args:
            sender: the driver's.
            ask: has the actor answer a greeting (:meth:`ActorEnd.handshake`).
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
        """Returns a call's arguments as they travel."""
        return [arg.argument(self._near) if isinstance(arg, Broadcast) else arg for arg in args]

    def freed(self) -> dict[str, tuple[int, ...]]:
        """Returns one more keyword argument, of calls with large results: earlier ones that are no longer read."""
        return {"freed": self._inbox.freed()} if self._near else {}

    def sent(self, handle: Any, args: Sequence[Any]) -> None:
        """Keeps what a call reads until it is answered.

        Args:
            handle: of the call.
            args: as given to :meth:`arguments`.
        """
        for broadcast in (arg for arg in args if isinstance(arg, Broadcast)):
            self._reading[handle] = broadcast

    def failed(self, handle: Any) -> None:
        """Takes note of a call without a result: the actor may go on reading."""
        if (broadcast := self._reading.pop(handle, None)) is not None:
            broadcast.abandon()

    def received(self, handle: Any, value: Any) -> Any:
        """Returns the result of a call.

        Args:
            handle: of the call.
            value: what came back.

        Raises:
            OSError: when it lies in memory that cannot be reached any more.
        """
        broadcast = self._reading.pop(handle, None)
        if not isinstance(value, Reply):
            return value
        if broadcast is not None and not value.done:
            broadcast.abandon()
        return self._inbox.open(value.value) if isinstance(value.value, Parcel) else value.value

    def forget(self) -> None:
        """Gives up the results of calls made so far; some may still be running."""
        for handle in list(self._reading):
            self.failed(handle)


class ActorEnd:
    """An actor's end of the connection to the driver.

    Args:
        limit: bytes of shared memory that it may use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inbox, self._outbox = Inbox(), Outbox(limit)

    @property
    def room(self) -> int:
        """Bytes of the largest results that are sent through shared memory: two lie there at a time."""
        return self._limit // 2

    def handshake(self, greeting: Parcel) -> Parcel | None:
        """Returns the same message, if the driver's parcels can be opened here."""
        try:
            return self._outbox.pack(np.array(self._inbox.open(greeting)), least=1)
        except OSError:
            return None

    def answered(self, work: Callable[[Tree], Any], broadcast: Tree | Parcel, freed: Sequence[int] | None) -> Any:
        """Returns the result of some work as it travels.

        Args:
            work: a function of the tree that was sent.
            broadcast: this, as it came.
            freed: segments of earlier results that the driver no longer reads; None if it reads none of this process.
        """
        if freed is None:
            assert not isinstance(broadcast, Parcel)
            return work(broadcast)
        for serial in freed:
            self._outbox.free(serial)
        if isinstance(broadcast, Parcel):
            self._inbox.freed()  # what was read before, in the same memory too, is of no interest
            result = work(self._inbox.open(broadcast))
            done = broadcast.serial in self._inbox.freed()
        else:
            result, done = work(broadcast), True
        return Reply(self._outbox.pack(result) or result, done)

    def reset(self) -> None:
        """Begins with other memory: results of before may never have been read, nor freed."""
        self._outbox = Outbox(self._limit)
