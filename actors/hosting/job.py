"""Jobs that the driver gives to hosts, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from actors.hosting.failures import Failure
from actors.hosting.memory import Lookups
from rayfl.aggregation.contributions import Inspected
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.aggregation.pieces import Piece
from rayfl.metrics import Statistics
from rayfl.params import Tree, leaves
from rayfl.storage.manifest import StoredFile

Scores = dict[int, dict[str, dict[str, Statistics]]]
"""By client, split and name of the model."""


@dataclass(frozen=True)
class Job:
    """One host's share of a call.

    Attributes:
        procedure: name of the algorithm's method to run.
        kind: ``mean`` reduces on the host, ``map`` returns every result, ``evaluate`` scores predictors, ``official``
            scores the server's models on the official test part, ``server`` runs a procedure of the server's own.
        round: t, 0-indexed.
        final: whether this is the evaluation after the last round.
        clients: whose procedures to run; for ``official`` the pieces, counted from K + 1.
        payloads: keyword arguments by client, as NumPy trees.
        splits: splits on which to score predictors (published ones for ``mean`` and ``map``); without any, the updates'
            variance is not asked for either.
        committed: where to find states that no host holds in memory.
        counted: whether what ``mean`` and ``map`` send and receive is traffic.
        attempts: how often a client's procedure is run at most.
        skips: whether a client that failed every time is left out, rather than an error.
        summands: how many contributions a mean is of, over all hosts.
        started: the round in which a client began, by client, if it was an earlier one.
        official: whether an evaluation also scores clients' own models on the official test part.
    """

    procedure: str
    kind: str
    round: int
    clients: tuple[int, ...]
    payloads: Mapping[int, Tree] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    final: bool = False
    committed: Mapping[int, StoredFile] = field(default_factory=dict)
    counted: bool = True
    attempts: int = 1
    skips: bool = False
    summands: int = 1
    started: Mapping[int, int] = field(default_factory=dict)
    official: bool = False

    def common_to_several(self, clients: Sequence[int], received: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The tensors that more than one of the clients were given, by client and path.

        Args:
            clients: ids.
            received: the tensors by the ``id`` of the array that they are of, see :func:`rayfl.params.from_numpy`.
        """
        seen: dict[int, int] = {}
        found: dict[str, Tensor] = {}
        for client in clients:
            for path, leaf in leaves(self.payloads.get(client, {})):
                if id(leaf) in received and seen.setdefault(id(leaf), client) != client:
                    found[f"{client}/{path}"] = received[id(leaf)]
        return found


@dataclass(slots=True)
class Found:
    """What one client has done in a job, which is fit to be part of the result.

    Attributes:
        contribution: to the mean of ``group``.
        group: see :class:`rayfl.aggregation.exact_sum.Weighted`.
        value: the result of a ``map``, a NumPy tree.
        scores: of its predictors, by split and name.
        upload_bytes: of its result, before any reduction; None where messages are not counted.
        update: its part of :attr:`JobResult.updates`.
    """

    contribution: Inspected | None = None
    group: str = ""
    value: Tree | None = None
    scores: dict[str, dict[str, Statistics]] | None = None
    upload_bytes: int | None = None
    update: Inspected | None = None


@dataclass
class JobResult:
    """The result of a job.

    Attributes:
        totals: the partial sums of a ``mean``, by group.
        values: the results of a ``map``, by client, as NumPy trees; that of the server's own procedure.
        scores: statistics of predictors.
        stateful: clients of the job that have a state on this host now.
        upload_bytes: bytes of each procedure's result, by client, before any reduction.
        updates: uniform mean of the clients' ``change`` (see ``Algorithm.update``) and of its squared norm;
            none if the job has no splits.
        failures: the clients that are left out; nothing of them is in the rest.
        retried: how often a client had failed before it succeeded, by client, of those that did fail.
        lookups: how often the host found clients' states and samples in memory, since its last result.
        seconds: how long each client's procedure took; of clients that ran together an equal part.
        printed: what clients' code printed, in lines that name them.
        apart: whether ``totals`` and ``updates`` are not here, but to be merged with those of other hosts.
        piece: a piece of such a sum, and its group (None: of the sum of the updates), on its way to another machine.
        busy_s: seconds of the processor, or of the GPU, in clients' procedures.
        flops: floating-point operations of their local steps; None where they are not counted.
        peak_bytes: the most memory that the process, or its GPU's allocator, has had.
    """

    totals: dict[str, ExactSum] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    stateful: list[int] = field(default_factory=list)
    upload_bytes: dict[int, int] = field(default_factory=dict)
    updates: ExactSum = field(default_factory=ExactSum)
    failures: dict[int, Failure] = field(default_factory=dict)
    retried: dict[int, int] = field(default_factory=dict)
    lookups: Lookups = field(default_factory=Lookups)
    seconds: dict[int, float] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    apart: bool = False
    piece: tuple[str | None, Piece] | None = None
    busy_s: float = 0.0
    flops: int | None = None
    peak_bytes: int = 0

    def absorb(self, client: int, found: Found) -> None:
        """Adds what a client has done.

        Raises:
            ValueError: when contributions to one mean differ in structure.
            OverflowError: when their sum leaves the fixed-point range.
        """
        if found.contribution is not None:
            self.totals.setdefault(found.group, ExactSum()).take(found.contribution)
        if found.update is not None:
            self.updates.take(found.update)
        if found.value is not None:
            self.values[client] = found.value
        if found.scores is not None:
            self.scores[client] = found.scores
        if found.upload_bytes is not None:
            self.upload_bytes[client] = found.upload_bytes
