"""The parts of a host that run clients' procedures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.hosting.device_states import DeviceStateCache
from actors.hosting.global_random import GlobalGenerators
from actors.hosting.running_clients import RunningClients
from actors.hosting.samples import Samples
from actors.hosting.scoring import Scorer
from actors.hosting.state import ClientStates
from algorithms.base import Algorithm
from rayfl.data.sources.official import OfficialTest
from rayfl.diagnosis.device_errors import free_device_memory, ran_out_of_memory
from rayfl.engine.engine import Engine
from rayfl.engine.round_context import RoundContext
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree, own_dicts


@dataclass
class Equipment:
    """The parts of a host that run clients' procedures.

    Attributes:
        algorithm: the method.
        engine: task, device and how to execute.
        states: of the hosted clients.
        samples: of the hosted clients.
        scorer: scores predictors.
        running: is told whose code runs.
        context: of the experiment; its round is set by each job.
        device_states: cache of client states on the device.
        norm: the parts of models that stay with their clients.
        recorded: names of what the task's network records in its buffers.
        official: opens the official test part; None where nobody is scored on it.
        generators: the process's global ones, which methods must not draw from.
    """

    algorithm: Algorithm
    engine: Engine
    states: ClientStates
    samples: Samples
    scorer: Scorer
    running: RunningClients
    context: RoundContext
    device_states: DeviceStateCache
    norm: PrivateNorm
    recorded: frozenset[str]
    official: Callable[[], OfficialTest] | None
    generators: GlobalGenerators

    def with_room(self, work: Callable[[], Tree]) -> Tree:
        """Returns the result of some work; retries without cached samples if the device runs out of memory."""
        try:
            return work()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            self.make_room([error])
        return work()

    def state_of(self, client: int) -> Tree:
        """Returns a client's state for a procedure; from the device cache if it is there."""
        there = self.device_states.get(client, self.states.handle(client))
        return self.states.checkout(client) if there is None else own_dicts(there)

    def make_room(self, errors: Sequence[Exception]) -> None:
        """Frees caches on the device, and tensors that exceptions hold."""
        self.device_states.disable()
        self.samples.give_way()
        self.engine.release()
        free_device_memory(*errors)
