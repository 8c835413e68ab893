"""Records clients that were left out in the tables, and warns of each once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from actors.hosting.failures import GIVEN_UP, Failure, named
from rayfl.errors import ClientError
from rayfl.results.tables import ResultTables

_log = logging.getLogger("rayfl")


class SkippedClients:
    """Notes the clients that were left out of rounds and evaluations of one run."""

    def __init__(self) -> None:
        self._said: set[tuple[int, int, str]] = set()

    def check_somebody(self, round: int, present: Sequence[int], failures: Mapping[int, Failure]) -> None:
        """Refuses a run in whose first round all clients fail, or that lacks clients since some fail.

        Later rounds may: whether they go on must not depend on where a run was interrupted.

        Args:
            round: 0-indexed.
            present: clients of the cohort that took part.
            failures: reasons of those that failed.

        Raises:
            ClientError: naming one of them.
        """
        failed = {client: why for client, why in failures.items() if why.procedure != GIVEN_UP}
        if round or present or len(failures) < 2 or not failed:
            return
        first, left = min(failed), [why.reason for why in failures.values() if why.procedure == GIVEN_UP]
        _log_traces("of the first round", failed)
        which = f"{len(failed)} of {len(failures)}" if left else f"all {len(failures)}"
        raise ClientError(
            f"{which} clients of the first round failed (client {first}, {failed[first].procedure}: "
            f"{failed[first].reason}), so that there is nothing to go on with{f' ({left[0]})' if left else ''}: "
            "clients.on_error leaves out single clients. rayfl.log has their tracebacks"
        )

    def note(self, round: int, failures: Mapping[int, Failure], tables: ResultTables) -> None:
        """Adds clients to the tables, and warns of those that it has not warned of before a rewind.

        Args:
            round: completed rounds, the one without these clients included.
            failures: reasons by client.
            tables: tables of the run.
        """
        tables.add_skipped(round, {client: (why.procedure, why.reason) for client, why in failures.items()})
        new = {client: why for client, why in failures.items() if (round, client, why.procedure) not in self._said}
        if new:
            self._said |= {(round, client, why.procedure) for client, why in new.items()}
            first = min(new)
            _log.warning(
                "round %d goes on without clients %s (client %d, %s: %s); skipped.parquet lists them",
                round,
                named(new),
                first,
                new[first].procedure,
                new[first].reason,
            )
            _log_traces(f"that round {round} goes on without", new)


def _log_traces(which: str, failures: Mapping[int, Failure]) -> None:
    for trace in dict.fromkeys(why.trace for why in failures.values() if why.trace):
        _log.info("of a client %s:\n%s", which, trace)
