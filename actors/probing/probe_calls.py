"""Finds the calls that a probe measures: runs a round with recording clients, which stop it at its first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from actors.hosting.job import Job
from algorithms.clients import Call, Clients, Procedure
from algorithms.fedavg import FedAvg
from rayfl.engine.round_context import RoundContext
from rayfl.experiment.parts import Parts
from rayfl.params import Tree, to_numpy
from rayfl.tasks.base import Task

_STACKED_CLIENTS = 12
"""Number of clients to stack, to measure the memory of each further one."""


@dataclass(frozen=True)
class ProbeCall:
    """The first call of a method's round, for a few clients.

    Attributes:
        job: the call; its clients are those closest to the median size, closest first.
        broadcast: its keyword arguments, a NumPy tree.
        is_fedavg: whether it is the call of federated averaging instead of the method.
    """

    job: Job
    broadcast: Tree
    is_fedavg: bool = False


def probe_calls(parts: Parts, sizes: np.ndarray) -> list[ProbeCall]:
    """Returns the calls to measure, best first: of the method's last round, of its first, of federated averaging.

    Args:
        parts: the experiment.
        sizes: samples by client and split (K, 3).
    """
    fedavg = Parts(parts.config.model_copy(update={"algorithm": FedAvg()}))
    found = [
        _first_call(parts, sizes, parts.context.rounds - 1),
        _first_call(parts, sizes, 0),
        _first_call(fedavg, sizes, 0),
    ]
    return [replace(call, is_fedavg=i == 2) for i, call in enumerate(found) if call is not None]


def _first_call(parts: Parts, sizes: np.ndarray, round: int) -> ProbeCall | None:
    """Returns a round's first call; None if the method cannot run this round from the initial server state."""
    clients = _Listening(parts.task, replace(parts.context, round=round), sizes, parts.config.evaluation.splits)
    try:
        parts.config.algorithm.round(parts.initial_server(), parts.cohort(round), clients)
    except _AskedError as asked:
        return asked.call
    except Exception:
        # The method may reject a state that no run reaches (a real error shows in the run), or the server may work
        # first.
        return None
    return None


class _AskedError(Exception):
    def __init__(self, call: ProbeCall) -> None:
        super().__init__()
        self.call = call


class _ServerAskedError(Exception):
    """The server works before any client, so what clients receive is unknown without that work."""


class _Listening(Clients):
    """The recording clients of a round: their first call ends it."""

    def __init__(self, task: Task, context: RoundContext, sizes: np.ndarray, splits: Sequence[str]) -> None:
        super().__init__(task, context, sizes[:, 0])
        self._splits = tuple(splits)

    def call(self, call: Call) -> NoReturn:
        chosen = call.of(middling(call.clients, self.num_samples(call.clients))[:_STACKED_CLIENTS])
        made: dict[int, np.ndarray] = {}
        own = {client: to_numpy(payload, made) for client, payload in chosen.payloads.items()}
        job = Job(call.procedure, call.kind, self.context.round, chosen.clients, own, self._splits)
        raise _AskedError(ProbeCall(job, to_numpy(call.broadcast)))

    def on_server(self, procedure: Procedure, given: Tree) -> NoReturn:
        raise _ServerAskedError


def middling(clients: Sequence[int], samples: np.ndarray) -> list[int]:
    """Sorts clients by distance to the median number of training samples; leaves out those without samples."""
    having = [(client, int(n)) for client, n in zip(clients, samples, strict=True) if n]
    median = float(np.median([n for _, n in having])) if having else 0.0
    return [client for client, _ in sorted(having, key=lambda one: (abs(one[1] - median), one[0]))]
