"""The clients, and the server's own device, as a method's round sees them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import RoundContext
from rayfl.engine.tasks import Task
from rayfl.params import Tree

Procedure = Callable[..., Coroutine[Any, Any, Any]]


class Clients(Protocol):
    """The clients as the server's procedure sees them. Each call says what it costs.

    A client that fails in a call ends the run, or is left out (``clients.on_error`` of the configuration). One of the
    round's cohort that is left out takes no part in the round at all: ``round`` is begun again with a cohort without
    it, and so never sees results that lack a member of its cohort. Of other clients' results it may, see ``required``.
    """

    @property
    def context(self) -> RoundContext:
        """Round, rounds, number of clients, random streams."""
        ...

    @property
    def task(self) -> Task:
        """What is learned: ``task.network`` knows the names of a model's tensors."""
        ...

    @property
    def pooled(self) -> int:
        """The id, K, of one more client that owns the samples of all the others (never evaluated)."""
        ...

    def num_samples(self, clients: Sequence[int]) -> np.ndarray:
        """Training samples n_k of the given clients, int64."""
        ...

    def mean(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        also: Weighted | None = None,
        counted: bool = True,
        required: bool | None = None,
    ) -> Tree:
        """The weighted mean of what ``procedure`` returns (:class:`Weighted`) over the cohort.

        Reduced on the actors: one partial sum an actor travels.

        Args:
            procedure: a method ``async (client, **broadcast, **payload) -> Weighted`` of the algorithm.
            cohort: client ids.
            broadcast: keyword arguments equal for all, sent once.
            payloads: further keyword arguments by client.
            also: one more contribution, of the server's own.
            counted: see :meth:`map`.
            required: True: a client that fails here ends the run, whatever the configuration says; None: one that is
                not of the round's cohort does; False: every one may be left out, and is missing in what comes back.
        """
        ...

    def means(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        required: bool | None = None,
    ) -> dict[str, Tree]:
        """Like :meth:`mean`, but one mean for each ``Weighted.group`` among the results, by group.

        Reduced on the actors: one partial sum an actor and group travels. That a client names its group costs, like
        its weight, nothing.
        """
        ...

    def map(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        counted: bool = True,
        required: bool | None = None,
    ) -> dict[int, Any]:
        """What ``procedure`` returns (a tree), by client, ascending; every client's result travels.

        Args:
            procedure: a method ``async (client, **broadcast, **payload) -> Tree`` of the algorithm.
            cohort: client ids.
            broadcast: keyword arguments equal for all, sent once.
            payloads: further keyword arguments by client.
            counted: whether the messages count as traffic. Not for work that a deployment's server does by itself
                and that is done on the actors here because they have the devices.
            required: see :meth:`mean`.
        """
        ...

    def on_server(self, procedure: Procedure, given: Tree) -> Tree:
        """What a procedure of the server's own returns: it runs on one actor, which has a device.

        The server has no state there: what a later round needs is returned, and given again. No message counts as
        traffic. If the actor is lost, the round is done again, with the same random numbers.

        Args:
            procedure: a method ``async (server, **given) -> Tree`` of the algorithm, where ``server`` is a
                :class:`rayfl.engine.server.Server`.
            given: its keyword arguments.

        Raises:
            ClientError: when it raises, or returns values that are not finite; no ``clients.on_error`` passes over it.
        """
        ...
