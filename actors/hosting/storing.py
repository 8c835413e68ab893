"""Stores clients' new states: copies them to the CPU while the device works for the next clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.hosting.equipment import Equipment
from actors.hosting.job import Job
from actors.hosting.outcomes import Home, blamed
from rayfl.params import Tree, num_bytes


class Storing:
    """The states of one stack of clients at a time.

    Args:
        own: has the states.
        job: what the clients do.
    """

    def __init__(self, own: Equipment, job: Job) -> None:
        self._own = own
        self._job = job
        self._leaving: Mapping[int, Tree] = {}
        self._home: Home = dict

    def may_wait(self, states: Mapping[int, Tree], following: Sequence[int]) -> bool:
        """Returns whether states may be copied while the next clients work: if there are any, and memory for both."""
        size = sum(map(num_bytes, states.values())) if following else 0
        return 0 < size <= self._own.device_states.limit

    def begin(self, states: Mapping[int, Tree], home: Home) -> None:
        """Takes the states to store.

        Args:
            states: on the device, by client.
            home: gives these states, and perhaps others, on the CPU.
        """
        self._leaving, self._home = states, home

    def finish(self) -> None:
        """Stores the states taken, once they are on the CPU.

        Raises:
            ClientError: naming the client whose state cannot be stored.
        """
        leaving, home, self._leaving, self._home = self._leaving, self._home, {}, dict
        if not leaving:
            return
        found = home()
        for id, there in leaving.items():
            try:
                self._own.states.replace(id, found[id], self._job.round)
                self._own.device_states.put(id, self._own.states.handle(id), there)
            except Exception as error:
                raise blamed(error, id, self._job, self._own.algorithm) from error
