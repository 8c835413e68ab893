"""Jobs that the driver sends to hosts, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from actors.hosting.failures import Failure
from actors.hosting.memory import Lookups
from actors.hosting.packed_scores import PackedScores, Scores
from actors.hosting.scoring import SplitScores
from rayfl.aggregation.contributions import Inspected
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.aggregation.pieces import Piece
from rayfl.params import Tree, leaves
from rayfl.storage.manifest import StoredFile


@dataclass(frozen=True)
class Job:
    """The part of a call of the driver that one host computes.

    Attributes:
        procedure: name of the algorithm's method to run.
        kind: ``mean`` reduces on the host, ``map`` returns every result, ``evaluate`` scores predictors, ``official``
            scores the server's models on the official test part, ``server`` runs a procedure of the server's own,
            ``value`` values the clients of the round.
        round: t, 0-indexed.
        final: whether this is the evaluation after the last round.
        clients: ids of the clients whose procedures to run; for ``official``, numbers of the pieces, from K + 1 on.
        payloads: keyword arguments by client, as NumPy trees.
        splits: splits on which to score predictors (published ones for ``mean`` and ``map``). If there are none, the
            variance of the updates is not computed either.
        committed: file of each state that no host holds in memory.
        counted: whether messages of ``mean`` and ``map`` count as traffic.
        attempts: maximum number of times that a client's procedure is run.
        skips: whether a client that failed every time is left out; if not, its failure is an error.
        summands: number of contributions to a mean, over all hosts.
        started: round in which a client started, by client, if it was an earlier one.
        official: whether an evaluation also scores clients' own models on the official test part.
        moved_norm: the clipping norm of the round, where it has moved from the first one.
        losses: whether an evaluation finds the losses of training samples, of one model of each client, and no scores.
        repeats: how often clients count in a mean, of those that count more than once.
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
    moved_norm: float | None = None
    losses: bool = False
    repeats: Mapping[int, int] = field(default_factory=dict)

    def common_to_several(self, clients: Sequence[int], received: Mapping[int, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Returns the tensors that more than one of some clients received, by client and path.

        Args:
            clients: ids of the clients.
            received: tensors by the ``id`` of the array that they were made from, see :func:`rayfl.params.from_numpy`.
        """
        owners: dict[int, set[int]] = {}
        for client in clients:
            for _, leaf in leaves(self.payloads.get(client, {})):
                if id(leaf) in received:
                    owners.setdefault(id(leaf), set()).add(client)
        found = {}
        for client in clients:
            of_client = leaves(self.payloads.get(client, {}))
            if own := {path: received[id(leaf)] for path, leaf in of_client if len(owners.get(id(leaf), ())) > 1}:
                found[client] = own
        return found


@dataclass(slots=True)
class ClientResult:
    """The checked result of one client in a job.

    Attributes:
        contribution: the client's part of the mean of ``group``.
        group: see :class:`rayfl.aggregation.exact_sum.Weighted`.
        value: the result of a ``map``, a NumPy tree.
        scores: statistics of its predictors, by split and name.
        upload_bytes: bytes of its result before any reduction; None if messages are not counted.
        update: the client's part of :attr:`JobResult.updates`.
        within: whether its change was no longer than the clipping norm.
    """

    contribution: Inspected | None = None
    group: str = ""
    value: Tree | None = None
    scores: SplitScores | None = None
    upload_bytes: int | None = None
    update: Inspected | None = None
    within: bool = False


@dataclass
class JobResult:
    """The result of a job.

    Attributes:
        totals: partial sums of a ``mean``, by group.
        values: results of a ``map``, or of the server's own procedure, by client, as NumPy trees.
        scores: statistics of predictors.
        stateful: clients of the job whose state is on this host afterwards.
        upload_bytes: bytes of each procedure's result, by client, before any reduction.
        within: how many clients' changes were no longer than the clipping norm.
        updates: uniform mean of the clients' ``change`` (see ``Algorithm.update``) and of its squared norm;
            none if the job has no splits.
        failures: clients that are left out; the other attributes contain nothing of them.
        retried: number of failures before success, by client; only clients that failed at least once.
        lookups: hits and misses of clients' states and samples in memory, since the host's last result.
        seconds: duration of each client's procedure; clients that ran together get equal parts.
        printed: lines that clients' code printed, each prefixed with the client.
        apart: whether ``totals`` and ``updates`` are kept apart, to be merged with those of other hosts.
        piece: a piece of such a sum that is sent to another machine, and its group (None: the sum of the updates).
        abandoned: whether the job was given up before its end; nobody may read what it has found.
        busy_s: seconds of CPU or GPU time in clients' procedures, without the time in which models were scored.
        flops: floating-point operations of clients' local steps; None if they are not counted.
        peak_bytes: peak memory of the process, or of its GPU's allocator.
    """

    totals: dict[str, ExactSum] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    stateful: list[int] = field(default_factory=list)
    upload_bytes: dict[int, int] = field(default_factory=dict)
    within: int = 0
    updates: ExactSum = field(default_factory=ExactSum)
    failures: dict[int, Failure] = field(default_factory=dict)
    retried: dict[int, int] = field(default_factory=dict)
    lookups: Lookups = field(default_factory=Lookups)
    seconds: dict[int, float] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    apart: bool = False
    piece: tuple[str | None, Piece] | None = None
    abandoned: bool = False
    busy_s: float = 0.0
    flops: int | None = None
    peak_bytes: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"scores": PackedScores.of(self.scores)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, scores=state["scores"].unpacked())

    def absorb(self, client: int, found: ClientResult) -> None:
        """Adds the result of a client.

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
        self.within += found.within
