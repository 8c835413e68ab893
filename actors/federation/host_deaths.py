"""Attributes deaths of hosts to clients: a client that ends or blocks its process fails like one that raises.

A dead process cannot say what it was doing. So all clients whose results it still owed are suspects. The round is
rolled back and runs the suspects one at a time; the client with which a host dies then is to blame. A host that hangs
can be asked instead. Deaths without a client to blame are the machine's, and limited by ``max_failures``.
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
    """The verdict that a client is to blame for the death of a host.

    Attributes:
        client: the client.
        failure: the failure to record.
        final: whether it has used all its attempts.
        explains: number of earlier deaths that it caused too.
    """

    client: int
    failure: Failure
    final: bool
    explains: int


class HostDeaths:
    """Tracks the deaths of a run's hosts, and the clients suspected of them.

    Args:
        policy: how to treat clients that fail.
    """

    def __init__(self, policy: ClientsConfig) -> None:
        self._policy = policy
        self._tries: Counter[tuple[int, str, int]] = Counter()
        self._suspects: dict[tuple[int, str], frozenset[int]] = {}
        self._unexplained: Counter[tuple[int, str]] = Counter()

    def suspects(self, job: Job) -> frozenset[int]:
        """Returns the clients that a call runs one at a time."""
        call = (job.round, job.procedure)
        # If a failed client ends the run anyway, finding it is worth a slower round only once hosts keep dying.
        if self._policy.on_error == "fail" and self._unexplained[call] < 2:
            return frozenset()
        return self._suspects.get(call, frozenset())

    def judge(self, death: HostDiedError, job: Job) -> Verdict | None:
        """Returns the client to blame for the death of a host; None while that is unknown, or if no client can be."""
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
        """Turns the death of a host in its body into a client's failure, once that is proven.

        Args:
            job: the job that the hosts run in the body.
            participation: the clients of the round.
            unscorable: the clients that are left out of the evaluations after it.
            required: as for :meth:`Participation.check_dispensable`.

        Raises:
            ClientError: when that client may not be left out. HostDiedError: while it is unknown who is to blame.
                RoundUndoneError: when the round must be repeated, with or without that client.
        """
        try:
            yield
        except HostDiedError as death:
            verdict = self.judge(death, job)
            if verdict is None:
                death.investigated = death.suspicious and bool(death.clients) and self._policy.on_error != "fail"
                raise
            place = f"client {verdict.client}, round {job.round + 1}, {job.procedure}: {verdict.failure.reason}"
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
