"""Finds the clients because of which hosts died: one that ends or blocks its process fails like one that raises.

A process that is gone says nothing of its last moments. So the clients whose results it still owed are suspects, and
the round, once undone, does them one at a time: with whom a host dies then is to blame. A host that hangs can be asked
instead. Deaths that nobody explains are the machine's, and limited by ``max_failures``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from actors.federation.participation import Participation
from actors.hosting.failures import Failure, RoundUndoneError
from actors.hosting.job import Job
from actors.processes.pool import HostDiedError
from rayfl.config.cluster_section import ClientsConfig
from rayfl.errors import ClientError

_log = logging.getLogger("rayfl")


@dataclass(frozen=True)
class Verdict:
    """A client is to blame for the death of a host.

    Attributes:
        client: the client.
        failure: what it did.
        final: whether it has used all its attempts.
        explains: how many earlier deaths were its doing too.
    """

    client: int
    failure: Failure
    final: bool
    explains: int


class HostDeaths:
    """The deaths of a run's hosts.

    Args:
        policy: what becomes of clients that fail.
    """

    def __init__(self, policy: ClientsConfig) -> None:
        self._policy = policy
        self._tries: Counter[tuple[int, str, int]] = Counter()
        self._suspects: dict[tuple[int, str], frozenset[int]] = {}
        self._unexplained: Counter[tuple[int, str]] = Counter()

    def suspects(self, job: Job) -> frozenset[int]:
        """The clients that a call does one at a time."""
        call = (job.round, job.procedure)
        # Where a client's failure ends the run anyway, its name is worth a slower round only if hosts go on dying.
        if self._policy.on_error == "fail" and self._unexplained[call] < 2:
            return frozenset()
        return self._suspects.get(call, frozenset())

    def judge(self, death: HostDiedError, job: Job) -> Verdict | None:
        """Returns the client to blame for the death of a host; None as long as that is open, or no client can be."""
        if not death.suspicious or not death.clients:
            return None
        call, client = (job.round, job.procedure), death.clients[0]
        for suspect in death.clients:
            self._tries[(*call, suspect)] += 1
        tries = self._tries[(*call, client)]
        proven = len(death.clients) == 1 and (death.certain or tries > 1)
        if not proven or self._policy.on_error == "fail":
            self._unexplained[call] += 1
            self._suspects[call] = self._suspects.get(call, frozenset()) | frozenset(death.clients)
            return None
        final = tries >= max(self._policy.attempts, 1 if death.certain else 2)
        self._suspects[call] = frozenset() if final else frozenset({client})
        if death.hung:
            reason = f"no end within clients.deadline_s={self._policy.deadline_s or 0:g} s"
        else:
            reason = "its process ended, each time"
        return Verdict(client, Failure(job.procedure, reason), final, self._unexplained.pop(call, 0))

    @contextmanager
    def attributed(
        self, job: Job, participation: Participation, unscorable: Mapping[int, Failure], required: bool | None
    ) -> Iterator[None]:
        """Makes the death of a host in its body a client's failure, where that is proven.

        Args:
            job: what the hosts do in the body.
            participation: who takes part in the round.
            unscorable: who takes no part in the evaluations after it.
            required: as for :meth:`Participation.check_dispensable`.

        Raises:
            ClientError: when that client may not be left out.
            HostDiedError: as long as it is open who is to blame.
            RoundUndoneError: when the round is done again, with or without that client.
        """
        try:
            yield
        except HostDiedError as death:
            verdict = self.judge(death, job)
            if verdict is None:
                death.investigated = death.suspicious and bool(death.clients) and self._policy.on_error != "fail"
                raise
            place = f"client {verdict.client}, round {job.round}, {job.procedure}: {verdict.failure.reason}"
            if verdict.final and not self._policy.skips:
                raise ClientError(f"{place} (it was tried {self._policy.attempts} times)") from death
            left_out = {verdict.client: verdict.failure} if verdict.final else {}
            absent = participation.absent
            if job.kind == "evaluate":
                unscorable = {**unscorable, **left_out}
            else:
                participation.check_dispensable(job.procedure, left_out, required)
                absent = absent | left_out
            _log.warning("%s; the round is done again%s", place, " without this client" if left_out else "")
            raise RoundUndoneError(job.round, absent, unscorable, verdict.explains) from death
