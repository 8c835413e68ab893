"""Stores clients' new states: copies them to the CPU while the device works for the next clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.hosting.equipment import Equipment
from actors.hosting.job import Job
from actors.hosting.outcomes import StatesOnCpu, client_error
from rayfl.params import Tree, num_bytes


class Storing:
    """Stores the states of one stack of clients at a time.

    Args:
        own: the host's equipment, with its states.
        job: job that the clients run.
    """

    def __init__(self, own: Equipment, job: Job) -> None:
        self._own = own
        self._job = job
        self._leaving: Mapping[int, Tree] = {}
        self._on_cpu: StatesOnCpu = tuple

    def may_wait(self, states: Mapping[int, Tree], following: Sequence[int]) -> bool:
        """Returns whether states can be copied while the next clients run: there are any, and memory for both."""
        size = sum(map(num_bytes, states.values())) if following else 0
        return 0 < size <= self._own.device_states.limit

    def begin(self, states: Mapping[int, Tree], on_cpu: StatesOnCpu) -> None:
        """Registers the states to store.

        Args:
            states: states on the device, by client.
            on_cpu: yields these states, and perhaps others, on the CPU.
        """
        self._leaving, self._on_cpu = states, on_cpu

    def finish(self) -> None:
        """Stores the registered states, once they are on the CPU.

        Raises:
            ClientError: naming the client whose state cannot be stored.
        """
        leaving, on_cpu, self._leaving, self._on_cpu = self._leaving, self._on_cpu, {}, tuple
        if not leaving:
            return
        for id, state in on_cpu():
            if id not in leaving:
                continue
            try:
                self._own.states.replace(id, state, self._job.round)
                self._own.device_states.put(id, self._own.states.handle(id), leaving[id])
            except Exception as error:
                raise client_error(error, id, self._job, self._own.algorithm) from error
