"""States of clients that stay on the device after a round, within a budget: those seen often need no transfer there."""

from __future__ import annotations

import logging

from torch import Tensor

from actors.hosting.memory import LeastRecentlyUsed, SpillHandle
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.params import Tree, map_leaves, num_bytes

_log = logging.getLogger("rayfl")


class DeviceStateCache:
    """Copies on the device of states that a host keeps; the least recently used leave first.

    A copy counts as long as the host keeps the state that it is of: after a rewind or a move there is another one.

    Args:
        limit: bytes; 0 keeps none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._copies: dict[int, tuple[SpillHandle, Tree]] = {}
        self._recent = LeastRecentlyUsed[int](limit, self._drop)

    def put(self, client: int, handle: SpillHandle | None, state: Tree) -> None:
        """Takes a client's state, whose tensors nobody changes in place any more, if there is room.

        Args:
            client: whose.
            handle: what the host keeps of it.
            state: with tensors on the device.
        """
        self._recent.forget(client)
        self._copies.pop(client, None)
        size = num_bytes(state) if self.limit else 0
        if handle is None or not 0 < size <= self.limit:
            return
        try:
            self._copies[client] = (handle, map_leaves(_alone, state))
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            self.disable()
            return
        self._recent.touch(client, size)

    def get(self, client: int, handle: SpillHandle | None) -> Tree | None:
        """A client's state on the device; None if it is not there, or not of what the host keeps."""
        held, state = self._copies.get(client, (None, None))
        if held is None or held is not handle:
            return None
        self._recent.touch(client, held.size)
        return state

    def clear(self) -> None:
        """Lets go of all copies."""
        for client in list(self._copies):
            self._recent.forget(client)
        self._copies.clear()

    def disable(self) -> None:
        """Lets go of all copies, and keeps none from now on: the memory is needed."""
        if self.limit:
            _log.warning("the device's memory is too small for states of clients to stay there")
        self.limit = 0
        self.clear()

    def _drop(self, client: int) -> None:
        del self._copies[client]


def _alone(leaf: object) -> object:
    """A tensor that holds no more memory than its own: what a stack leaves may be a view of it."""
    if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() != leaf.nbytes:
        return leaf.detach().clone()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
