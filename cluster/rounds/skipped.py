"""Records clients that were left out in the tables, and warns of each once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from actors.hosting.failures import Failure, named
from rayfl.results.tables import ResultTables

_log = logging.getLogger("rayfl")


class SkippedClients:
    """Notes the clients that were left out of rounds and evaluations of one run."""

    def __init__(self) -> None:
        self._said: set[tuple[int, int, str]] = set()

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
            for trace in dict.fromkeys(why.trace for why in new.values() if why.trace):
                _log.info("of a client that round %d goes on without:\n%s", round, trace)
