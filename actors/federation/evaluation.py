"""Scores models of clients and of the server, distributed over all hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from actors.federation.hosts import Hosts
from actors.hosting.failures import Failure
from actors.hosting.job import Job
from actors.hosting.packed_scores import Scores
from algorithms.on_demand import OnDemand
from rayfl.data.sources.official import OFFICIAL_PIECE
from rayfl.metrics import Statistics
from rayfl.params import Tree

CLIENTS_AT_A_TIME = 64
"""Clients per call: enough to make the call cheap, few enough to show progress."""
_BYTES_AT_A_TIME = 128 << 20
"""About the bytes per call of what single clients are sent, where that is made on demand."""


class Evaluation:
    """Has hosts score models, and collects the results.

    Args:
        hosts: the hosts.
        sizes: samples by client and split (K, 3): train, validation, test.
    """

    def __init__(self, hosts: Hosts, sizes: np.ndarray) -> None:
        self._hosts = hosts
        self._sizes = sizes

    def of_clients(
        self,
        job: Job,
        clients: Sequence[int],
        server: Tree,
        payloads: Mapping[int, Tree],
        report: Callable[[int, int], None] | None,
        alone: Collection[int] = (),
    ) -> tuple[Scores, dict[int, Failure]]:
        """Scores the predictors of clients.

        Args:
            job: which procedure, on which splits.
            clients: whose predictors.
            server: the part of the server's tree that all clients receive.
            payloads: further arguments by client.
            report: called with the number of clients scored so far and the total, as results arrive.
            alone: clients that are run one at a time.

        Returns:
            The scores by client, ascending, and the clients that failed.
        """
        counted = slice(0, 1) if job.losses else slice(1, None)
        costs = {client: float(self._sizes[client, counted].sum() + 1) for client in clients}
        scores: Scores = {}
        unscored: dict[int, Failure] = {}
        count = CLIENTS_AT_A_TIME
        if isinstance(payloads, OnDemand):
            count = max(1, min(count, _BYTES_AT_A_TIME // max(payloads.size, 1)))
        for result in self._hosts.dispatch(job, costs, server, payloads, at_a_time=count, alone=alone):
            scores.update(result.scores)
            unscored.update(result.failures)
            if report is not None:
                report(len(scores) + len(unscored), len(costs))
        return dict(sorted(scores.items())), unscored

    def of_server(self, job: Job, server: Tree, samples: int) -> dict[str, Statistics]:
        """Scores the server's own models on the official test part, in pieces; by model."""
        first = len(self._sizes) + 1
        costs = {first + i: float(OFFICIAL_PIECE) for i in range(-(-samples // OFFICIAL_PIECE))}
        pieces: Scores = {}
        for result in self._hosts.dispatch(job, costs, server, {}):
            pieces.update(result.scores)
        total: dict[str, Statistics] = {}
        for piece in sorted(pieces):
            for model, statistics in pieces[piece]["official"].items():
                total[model] = total[model] + statistics if model in total else statistics
        return total
