"""Prefetches samples of the next clients in a thread, while the current ones train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rayfl.examples import Examples

Key = tuple[int, str]
"""Client and split."""


class ReadAhead:
    """Prefetches for the next clients the splits that the current ones have used; by one thread, one split at a time.

    The thread does what would be done when a client's turn comes, so results do not depend on it; an error waits until
    the client asks.

    Args:
        read: reads a client's split on the CPU; called by the thread.
        fitting: makes room, given the running clients, the keys whose reading has started and the wanted keys; returns
            the wanted keys that fit. Called by the thread that asks for samples.
    """

    def __init__(
        self,
        read: Callable[[int, str], Examples],
        fitting: Callable[[Sequence[int], Sequence[Key], Sequence[Key]], Sequence[Key]],
    ) -> None:
        self._read, self._fitting = read, fitting
        self._running: tuple[int, ...] = ()
        self._next: tuple[int, ...] = ()
        self._waiting: dict[str, set[int]] = {}
        self._found: dict[Key, Future[Examples]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def expect(self, clients: Sequence[int], following: Sequence[int]) -> None:
        """Sets the current and the next clients; drops what was prefetched for others.

        Args:
            clients: clients that run now.
            following: clients that run next.
        """
        self._running, self._next, self._waiting = tuple(clients), tuple(following), {}
        for key in [key for key in self._found if key[0] not in (*self._running, *self._next)]:
            self._found.pop(key).cancel()

    def asked(self, client: int, split: str, loaded: Callable[[Key], bool]) -> None:
        """Starts to read a split of the next clients, once all running clients have theirs.

        Args:
            client: client that has received the split.
            split: name of the split.
            loaded: returns whether a client's split is in memory already.
        """
        if not self._next:
            return
        waiting = self._waiting.setdefault(split, set(self._running))
        if client not in waiting:
            return
        waiting.discard(client)
        if waiting:
            return
        wanted = [key for id in self._next if (key := (id, split)) not in self._found and not loaded(key)]
        for key in self._fitting(self._running, list(self._found), wanted) if wanted else ():
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayfl-ahead")
            self._found[key] = self._thread.submit(self._read, *key)

    def take(self, key: Key) -> Examples | None:
        """Waits for a prefetched split and returns it; None if it was not requested.

        Raises what reading it raised.
        """
        found = self._found.pop(key, None)
        return None if found is None or found.cancel() else found.result()

    def stop(self) -> None:
        """Drops all prefetched samples, and stops prefetching until the next job."""
        self.expect((), ())
