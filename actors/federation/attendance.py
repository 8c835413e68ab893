"""Who takes part in a round: what happens when clients fail that may be left out.

A client that fails takes no part in the round at all, as if it had not been sampled: means, weights and numbers that
depend on the cohort are those of the rest. So the method's round is begun again without it. If it failed in the
round's first call, what the others did there is kept and not done again; if later, the round must be undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from actors.hosting.failures import ClientsFailedError, Failure, RoundUndoneError
from actors.hosting.job import JobResult
from rayfl.errors import ClientError
from rayfl.params import Tree


@dataclass(frozen=True)
class Call:
    """What a method asks of some clients.

    Attributes:
        procedure: name of the method's procedure.
        kind: ``mean`` or ``map``.
        clients: who is asked.
        broadcast: keyword arguments for all.
        payloads: keyword arguments by client.
    """

    procedure: str
    kind: str
    clients: tuple[int, ...]
    broadcast: Tree
    payloads: Mapping[int, Tree]

    def without(self, clients: Mapping[int, Any]) -> Call:
        """The same for fewer clients."""
        return replace(
            self,
            clients=tuple(client for client in self.clients if client not in clients),
            payloads={client: payload for client, payload in self.payloads.items() if client not in clients},
        )

    def same(self, other: Call) -> bool:
        """Whether the clients would do the same, to the bit."""
        mine, others = (self.procedure, self.kind, self.clients), (other.procedure, other.kind, other.clients)
        return mine == others and _alike([self.broadcast, self.payloads], [other.broadcast, other.payloads])


class Attendance:
    """The clients of one round.

    Args:
        round: 0-indexed.
        cohort: the sampled clients; None: everybody counts as sampled.
        absent: clients that are known to fail in this round.

    Attributes:
        absent: the clients that take no part, and why.
    """

    def __init__(self, round: int, cohort: Sequence[int] | None, absent: Mapping[int, Failure]) -> None:
        self._round = round
        self._cohort = None if cohort is None else frozenset(cohort)
        self.absent = dict(absent)
        self._calls = 0
        self._kept: tuple[Call, list[JobResult]] | None = None

    def present(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that take part."""
        return [client for client in clients if client not in self.absent]

    def begin_again(self) -> None:
        """The method's round starts anew, without the absent."""
        self._calls = 0

    def end(self) -> None:
        """The method's round is over.

        Raises:
            RoundUndoneError: when clients did something that this round, in the end, has not asked for.
        """
        if self._kept is not None and self._kept[0].clients:
            raise RoundUndoneError(self._round, self.absent)

    def kept(self, call: Call) -> list[JobResult] | None:
        """What the clients have done of this call already; None for nothing.

        Raises:
            RoundUndoneError: when they have done something else.
        """
        if self._kept is None:
            return None
        (done, results), self._kept = self._kept, None
        if not call.same(done):
            raise RoundUndoneError(self._round, self.absent)
        return [replace(result, failures={}) for result in results]

    def answered(self, call: Call, results: list[JobResult], required: bool | None) -> None:
        """Takes note of a call's results, and of the clients that failed in it.

        Args:
            call: what was asked.
            results: what the hosts answered.
            required: whether none of the clients may be missed; None: none that was not sampled in this round.

        Raises:
            ClientError: when a client failed that may not be missed.
            ClientsFailedError: when the method's round must begin again without clients.
            RoundUndoneError: when the clients' states must be what they were before the round, first.
        """
        failures = {client: failure for result in results for client, failure in result.failures.items()}
        sampled = self.excuse(call.procedure, failures, required)
        self.absent |= failures
        if failures and self._calls:
            raise RoundUndoneError(self._round, self.absent)
        if sampled:
            self._kept = (call.without(failures), results)
            raise ClientsFailedError
        self._calls += 1

    def excuse(self, procedure: str, failures: Mapping[int, Failure], required: bool | None) -> list[int]:
        """Makes sure that a call can do without some clients.

        Args:
            procedure: that of the call.
            failures: why, by client.
            required: as for :meth:`answered`.

        Returns:
            Those of them that were sampled in this round.

        Raises:
            ClientError: when one of them may not be missed.
        """
        sampled = [client for client in sorted(failures) if self._cohort is None or client in self._cohort]
        needed = [client for client in sorted(failures) if required or (required is None and client not in sampled)]
        if needed:
            raise ClientError(
                f"client {needed[0]}, round {self._round}, {procedure}: {failures[needed[0]].reason}; this pass "
                "of the method needs every one of its clients, so clients.on_error cannot leave this one out"
            )
        return sampled


def _alike(left: Any, right: Any) -> bool:
    """Whether two trees are equal to the bit."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
