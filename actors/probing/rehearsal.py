"""Which steps a probe does: a round's first call, found by playing the round with clients that only listen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from actors.hosting.job import Job
from algorithms.base import Procedure
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import RoundContext
from rayfl.engine.tasks import Task
from rayfl.experiment.parts import Parts
from rayfl.params import Tree, to_numpy

_STACKED_CLIENTS = 4
"""So many clients together show what each further one takes."""


@dataclass(frozen=True)
class Rehearsal:
    """A call that a round of a method makes first, for a few clients.

    Attributes:
        job: the call; its clients are of middling size, the most middling first.
        broadcast: its keyword arguments, a NumPy tree.
        plain: it is federated averaging's call, not the method's.
    """

    job: Job
    broadcast: Tree
    plain: bool = False


def rehearsals(parts: Parts, sizes: np.ndarray) -> list[Rehearsal]:
    """What may be measured, best first: the method's last round, where it uses all that it has; its first; a plain one.

    Args:
        parts: the experiment.
        sizes: samples by client and split (K, 3).
    """
    plain = Parts(parts.config.model_copy(update={"algorithm": FedAvg()}))
    found = [
        _first_call(parts, sizes, parts.context.rounds - 1),
        _first_call(parts, sizes, 0),
        _first_call(plain, sizes, 0),
    ]
    return [replace(call, plain=i == 2) for i, call in enumerate(found) if call is not None]


def _first_call(parts: Parts, sizes: np.ndarray, round: int) -> Rehearsal | None:
    """None where the method cannot begin this round with what the server has at first."""
    clients = _Listening(parts.task, replace(parts.context, round=round), sizes, parts.config.evaluation.splits)
    try:
        parts.config.algorithm.round(parts.initial_server(), parts.cohort(round), clients)
    except _AskedError as asked:
        return asked.call
    except Exception:
        # A method may refuse what never comes about in a run; if it does, the run itself says so. Or its server works
        # first.
        return None
    return None


class _AskedError(Exception):
    def __init__(self, call: Rehearsal) -> None:
        super().__init__()
        self.call = call


class _ServerAskedError(Exception):
    """The server works before any client: what clients are sent then is not known without doing that."""


class _Listening:
    """The clients of a round (see ``algorithms.clients.Clients``) that answer nothing: the first call ends it."""

    def __init__(self, task: Task, context: RoundContext, sizes: np.ndarray, splits: Sequence[str]) -> None:
        self.task = task
        self.context = context
        self._samples = np.append(sizes[:, 0], sizes[:, 0].sum())
        self._splits = tuple(splits)

    @property
    def pooled(self) -> int:
        return self.context.num_clients

    def num_samples(self, clients: Sequence[int]) -> np.ndarray:
        found: np.ndarray = self._samples[np.asarray(clients, dtype=np.int64)]
        return found

    def mean(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        also: Weighted | None = None,
        counted: bool = True,
        required: bool | None = None,
    ) -> Tree:
        self._asked(procedure, "mean", cohort, broadcast, payloads)

    def means(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        required: bool | None = None,
    ) -> dict[str, Tree]:
        self._asked(procedure, "mean", cohort, broadcast, payloads)

    def map(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        counted: bool = True,
        required: bool | None = None,
    ) -> dict[int, Any]:
        self._asked(procedure, "map", cohort, broadcast, payloads)

    def on_server(self, procedure: Procedure, given: Tree) -> Tree:
        raise _ServerAskedError

    def _asked(
        self,
        procedure: Procedure,
        kind: str,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None,
    ) -> NoReturn:
        chosen = middling(cohort, self.num_samples(cohort))[:_STACKED_CLIENTS]
        own = {client: to_numpy(payloads[client]) for client in chosen if client in payloads} if payloads else {}
        job = Job(procedure.__name__, kind, self.context.round, tuple(chosen), own, self._splits)
        raise _AskedError(Rehearsal(job, to_numpy(broadcast)))


def middling(clients: Sequence[int], samples: np.ndarray) -> list[int]:
    """Clients by how close they are to the median number of training samples, closest first; none without samples."""
    having = [(client, int(n)) for client, n in zip(clients, samples, strict=True) if n]
    median = float(np.median([n for _, n in having])) if having else 0.0
    return [client for client, _ in sorted(having, key=lambda one: (abs(one[1] - median), one[0]))]
