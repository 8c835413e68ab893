"""Keeps record of who takes part in a round, when clients fail that may be left out.

A client that fails takes no part in the round at all, as if it had not been sampled: means, weights and numbers that
depend on the cohort are those of the rest. So the method's round is begun again without it. If it failed in the
round's first call, what the others did there is kept and not done again; if later, the round must be undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actors.hosting.failures import ClientsFailedError, Failure, RoundUndoneError
from actors.hosting.job import JobResult
from algorithms.clients import Call
from rayfl.errors import ClientError


class Participation:
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
        """Returns the clients that take part."""
        return [client for client in clients if client not in self.absent]

    def begin_again(self) -> None:
        """The method's round starts again, without the absent."""
        self._calls = 0

    def end(self) -> None:
        """The method's round is over.

        Raises:
            RoundUndoneError: when clients did something that this round, in the end, has not asked for.
        """
        if self._kept is not None and self._kept[0].clients:
            raise RoundUndoneError(self._round, self.absent)

    def completed(self, call: Call) -> list[JobResult] | None:
        """Returns the results of clients that have done this call already; None if none has.

        Raises:
            RoundUndoneError: when they have done something else.
        """
        if self._kept is None:
            return None
        (done, results), self._kept = self._kept, None
        if not call.same(done):
            raise RoundUndoneError(self._round, self.absent)
        return [replace(result, failures={}) for result in results]

    def record(self, call: Call, results: list[JobResult]) -> None:
        """Takes note of a call's results, and of the clients that failed in it.

        Args:
            call: what was asked.
            results: what the hosts answered.

        Raises:
            ClientError: when a client failed that may not be missed.
            ClientsFailedError: when the method's round must begin again without clients.
            RoundUndoneError: when the clients' states must be what they were before the round, first.
        """
        failures = {client: failure for result in results for client, failure in result.failures.items()}
        sampled = self.check_dispensable(call.procedure, failures, call.required)
        self.absent |= failures
        if failures and self._calls:
            raise RoundUndoneError(self._round, self.absent)
        if sampled:
            self._kept = (call.of([client for client in call.clients if client not in failures]), results)
            raise ClientsFailedError
        self._calls += 1

    def check_dispensable(self, procedure: str, failures: Mapping[int, Failure], required: bool | None) -> list[int]:
        """Makes sure that a call can do without some clients.

        Args:
            procedure: that of the call.
            failures: why, by client.
            required: whether none of the clients may be missed; None: none that was not sampled in this round.

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
