"""An LRU cache of client states on the device, so that recently seen clients need no transfer."""

from __future__ import annotations

import logging

from torch import Tensor

from actors.hosting.memory import LeastRecentlyUsed, SpillHandle
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.params import Tree, map_leaves, num_bytes

_log = logging.getLogger("rayfl")


class DeviceStateCache:
    """Copies of client states on the device; evicts the least recently used.

    A copy is valid as long as the host has the same handle of the state: a rewind or a move replaces it.

    Args:
        limit: bytes; 0 keeps none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._copies: dict[int, tuple[SpillHandle, Tree]] = {}
        self._recent = LeastRecentlyUsed[int](limit, self._drop)

    def put(self, client: int, handle: SpillHandle | None, state: Tree) -> None:
        """Caches a client's state if it fits; its tensors must not be changed in place afterwards.

        Args:
            client: the client's id.
            handle: the host's handle of the same state.
            state: the state on the device.
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
        """Returns a client's state on the device; None if it is not cached, or out of date."""
        held, state = self._copies.get(client, (None, None))
        if held is None or held is not handle:
            return None
        self._recent.touch(client, held.size)
        return state

    def clear(self) -> None:
        """Drops all copies."""
        for client in list(self._copies):
            self._recent.forget(client)
        self._copies.clear()

    def disable(self) -> None:
        """Drops all copies and caches nothing from now on, because the memory is needed."""
        if self.limit:
            _log.warning("the device's memory is too small for states of clients to stay there")
        self.limit = 0
        self.clear()

    def _drop(self, client: int) -> None:
        del self._copies[client]


def _alone(leaf: object) -> object:
    """Returns a copy of a tensor that is a view of larger memory, such as a whole stack's."""
    if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() != leaf.nbytes:
        return leaf.detach().clone()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
