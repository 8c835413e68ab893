"""Tracks who takes part in a round when failed clients may be left out.

A failed client is treated as if it had not been sampled: means, weights and cohort sizes are those of the others. So
the method's round is restarted without it. If it failed in the round's first call, the others' results of that call are
reused; if later, the round must be rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actors.hosting.failures import GIVEN_UP, ClientsFailedError, Failure, RoundUndoneError
from actors.hosting.job import JobResult
from algorithms.clients import Call
from rayfl.engine.round_context import RoundContext
from rayfl.engine.shortfall import shortfall
from rayfl.errors import ClientError


class Participation:
    """The participating clients of one round.

    Args:
        round: 0-indexed.
        cohort: the sampled clients; None for all clients.
        absent: clients already known to fail in this round.

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

    def give_up_short(self, context: RoundContext, cohort: Sequence[int]) -> None:
        """Gives the round up if too few clients are left for what its aggregation needs: then nobody takes part.

        Args:
            context: of the round.
            cohort: the sampled clients.

        Raises:
            RoundUndoneError: when clients have taken part already, whose states must first be rolled back.
        """
        present = self.present(cohort)
        if not present or not (why := shortfall(context, present)):
            return
        everybody = {**self.absent, **{client: Failure(GIVEN_UP, why) for client in present}}
        if self._kept is not None:
            raise RoundUndoneError(self._round, everybody)
        self.absent = everybody

    def begin_again(self) -> None:
        """Restarts the method's round, without the absent clients."""
        self._calls = 0

    def end(self) -> None:
        """Ends the method's round.

        Raises:
            RoundUndoneError: when the restarted round has not repeated the call whose results were kept.
        """
        if self._kept is not None and self._kept[0].clients:
            raise RoundUndoneError(self._round, self.absent)

    def completed(self, call: Call) -> list[JobResult] | None:
        """Returns the kept results of this call from before a restart; None if there are none.

        Raises:
            RoundUndoneError: when the kept results are of another call.
        """
        if self._kept is None:
            return None
        (done, results), self._kept = self._kept, None
        if not call.same(done):
            raise RoundUndoneError(self._round, self.absent)
        return [replace(result, failures={}) for result in results]

    def record(self, call: Call, results: list[JobResult]) -> None:
        """Records a call's results and the clients that failed in it.

        Args:
            call: what was asked.
            results: what the hosts answered.

        Raises:
            ClientError: when a client failed that may not be left out. ClientsFailedError: when the method's round must
                restart without the failed clients. RoundUndoneError: when clients' states must first be rolled back to
                before the round.
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
        """Checks that a call may leave out some clients.

        Args:
            procedure: the call's procedure.
            failures: the failure of each client.
            required: whether no client may be left out; None: whether only sampled ones may.

        Returns:
            Those of them that were sampled in this round.

        Raises:
            ClientError: when one of them may not be left out.
        """
        sampled = [client for client in sorted(failures) if self._cohort is None or client in self._cohort]
        needed = [client for client in sorted(failures) if required or (required is None and client not in sampled)]
        if needed:
            raise ClientError(
                f"client {needed[0]}, round {self._round + 1}, {procedure}: {failures[needed[0]].reason}; this pass "
                "of the method needs every one of its clients, so clients.on_error cannot leave this one out"
            )
        return sampled
