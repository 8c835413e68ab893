"""The clients as a method's server sees them: four ways to ask, which all are one call; and its own device."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from algorithms.calls import Call as Call
from algorithms.calls import Replies as Replies
from algorithms.receiving import as_sent, check_cohort, check_messages, combined
from algorithms.releasing import next_norm, released
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.diagnosis.tracebacks import own_definition
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ClientError, MethodError
from rayfl.naming.objects import names_an_object
from rayfl.params import Tree
from rayfl.selection.updates import changes_of
from rayfl.tasks.base import Task

Procedure = Callable[..., Coroutine[Any, Any, Any]]

NOT_ASYNCHRONOUS = "{0} is called as a coroutine: define it with `async def {0}`"
"""What is said of a procedure that is a plain function."""


class Clients(ABC):
    """The clients as the server's procedure sees them. Each call says what it costs.

    A client that fails in a call ends the run, or is left out (``clients.on_error`` of the configuration). One of the
    round's cohort that is left out takes no part in the round at all: ``round`` is begun again with a cohort without
    it, and so never sees results that lack a member of its cohort. Of other clients' results it may, see ``required``.

    Args:
        task: what is learned: ``task.network`` knows the names of a model's tensors.
        context: round, rounds, number of clients, random streams.
        samples: training samples n_k of all clients, in their order, int64; those of newcomers are the last.

    Attributes:
        next_norm: the clipping norm of the next round; None where the round has not moved it.
        remembered: what the rule of the section ``aggregator`` needs of this round and of earlier ones, by call.
        changes: how each client has changed the parameters in this round, (P,), where the section ``selection`` needs
            to know.
        messages: what the server has received from each client in this round, where the section ``contribution`` needs
            to know.
    """

    def __init__(self, task: Task, context: RoundContext, samples: np.ndarray) -> None:
        self._task = task
        self._context = context
        self._count(samples)
        self._releases = 0
        self.next_norm: float | None = None
        self.remembered: Tree = {}
        self.changes: dict[int, Tensor] = {}
        self.messages: dict[int, Weighted] = {}

    def _count(self, samples: np.ndarray) -> None:
        self._samples = np.append(samples, samples[: self._context.num_clients].sum())

    @abstractmethod
    def call(self, call: Call) -> Replies:
        """Runs a procedure on clients, and returns what they send back. Methods use the three below."""

    @property
    def context(self) -> RoundContext:
        """Round, rounds, number of clients, random streams."""
        return self._context

    @property
    def task(self) -> Task:
        """Returns what is learned."""
        return self._task

    @property
    def pooled(self) -> int:
        """The id of one more client that owns the samples of all that may train (never evaluated)."""
        return len(self._samples) - 1

    def num_samples(self, clients: Sequence[int]) -> np.ndarray:
        """Training samples n_k of the given clients, int64."""
        found: np.ndarray = self._samples[np.asarray(clients, dtype=np.int64)]
        return found

    def received(self, client: int, server: Tree) -> Tree:
        """Returns what the server's tree was when a client of the cohort began.

        Args:
            client: its id.
            server: the server's tree as it is, for a client that began in this round; else ``Algorithm.sent`` of then.
        """
        return server

    def mean(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        also: Weighted | None = None,
        counted: bool = True,
        required: bool | None = None,
        down: Mapping[int, int] | None = None,
    ) -> Tree:
        """The weighted mean of what ``procedure`` returns (:class:`Weighted`) over the cohort.

        Reduced on the actors: one partial sum an actor travels. Robust rules (section ``aggregator``), which then give
        what stands for the mean, and attacks on messages (``attack``) need every client's message, which then travels.

        Args:
            procedure: a method ``async (client, **broadcast, **payload) -> Weighted`` of the algorithm.
            cohort: client ids.
            broadcast: keyword arguments equal for all, sent once.
            payloads: further keyword arguments by client.
            also: one more contribution, of the server's own.
            counted: see :meth:`map`.
            required: True: a client that fails here ends the run, whatever the configuration says; None: one that is
                not of the round's cohort does; False: every one may be left out, and is missing in what comes back.
            down: bytes by client that a deployment sends in place of the tensors, if clients can make these from fewer,
                as a model from the scalars that it has moved by.

        Raises:
            ClientError: when the contributions have no mean together, as trees of different structures.
            MethodError: when ``procedure`` is not asynchronous, or the sections ``privacy``, ``compression``,
                ``aggregator`` or ``attack`` cannot be applied to the messages.
        """
        self._check_messages("mean", procedure, also is None)
        call = _call("mean", procedure, cohort, broadcast, payloads, counted, required, down)
        check_cohort(self._context, cohort, call.procedure)
        if self._context.one_by_one:
            context, sent = self._context, self.call(replace(call, kind="each")).values
            messages, received = as_sent(context, sent, broadcast, call.procedure, context.aggregator.least)
            if context.keeps_changes:
                trees = {client: message.tree for client, message in messages.items()}
                self.changes = changes_of(trees, received, self._task.network.buffer_names)
            if context.keeps_messages:
                self.messages = messages
            return combined(context, messages, received, call.procedure, self._releases, self.remembered)
        total = ExactSum()
        if also is not None:
            total.add(also)
        replies = self.call(call)
        for part in replies.totals.values():
            merge(total, part, self._context.round, call.procedure)
        self.next_norm = next_norm(self._context, replies.within, total.count)
        return released(self._context, total, broadcast)

    def means(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        required: bool | None = None,
    ) -> dict[str, Tree]:
        """One weighted mean for each ``Weighted.group`` among the results, by group, ascending; else :meth:`mean`.

        Reduced on the actors: one partial sum an actor and group travels. That a client names its group costs, like
        its weight, nothing.
        """
        self._check_messages("means", procedure)
        totals = self.call(_call("mean", procedure, cohort, broadcast, payloads, required=required)).totals
        return {group: totals[group].mean() for group in sorted(totals)}

    def each(
        self, procedure: Procedure, cohort: Sequence[int], broadcast: Tree, required: bool | None = None
    ) -> dict[int, Weighted]:
        """The summands of :meth:`mean` one by one, by client, ascending: for a server that weighs them by itself.

        Every client's message travels. Of malicious clients (``attack``) it is what they send in its place.

        Args:
            procedure: as for :meth:`mean`.
            cohort: client ids.
            broadcast: keyword arguments equal for all, of which the messages are changes.
            required: see :meth:`mean`.

        Raises:
            ClientError: when what a malicious client sends is not finite.
            MethodError: as for :meth:`mean`, and with a rule of the section ``aggregator``.
        """
        self._check_messages("each", procedure)
        call = _call("each", procedure, cohort, broadcast, None, required=required)
        return as_sent(self._context, self.call(call).values, broadcast, call.procedure)[0]

    def map(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        counted: bool = True,
        required: bool | None = None,
        down: Mapping[int, int] | None = None,
    ) -> dict[int, Any]:
        """Returns what ``procedure`` returns (a tree), by client, ascending; every client's result travels.

        Args:
            procedure: a method ``async (client, **broadcast, **payload) -> Tree`` of the algorithm.
            cohort: client ids.
            broadcast: keyword arguments equal for all, sent once.
            payloads: further keyword arguments by client.
            counted: whether the messages count as traffic. Not for work that a deployment's server does by itself
                and that is done on the actors here because they have the devices.
            required: see :meth:`mean`.
            down: see :meth:`mean`.

        Raises:
            MethodError: when ``procedure`` is not asynchronous.
        """
        self._check_messages("map", procedure)
        call = _call("map", procedure, cohort, broadcast, payloads, counted, required, down)
        return dict(sorted(self.call(call).values.items()))

    def _check_messages(self, kind: str, procedure: Procedure, alone: bool = True) -> None:
        self._releases += 1
        check_messages(self._context, kind, alone, self._releases)
        of_users = names_an_object(str(getattr(getattr(procedure, "__self__", None), "name", "")))
        if self._releases > 1 and of_users and self._context.privacy.of_examples:
            raise MethodError(
                "privacy.example_clip_norm: a method of one's own may ask its clients once in a round: a second call "
                "would train with the noise of the first one, and epsilon counts one"
            )

    @abstractmethod
    def on_server(self, procedure: Procedure, given: Tree) -> Tree:
        """Returns what a procedure of the server's own returns: it runs on one actor, which has a device.

        The server has no state there: what a later round needs is returned, and given again. No message counts as
        traffic. If the actor is lost, the round is done again, with the same random numbers.

        Args:
            procedure: a method ``async (server, **given) -> Tree`` of the algorithm, where ``server`` is a
                :class:`rayfl.engine.server.Server`.
            given: its keyword arguments.

        Raises:
            ClientError: when it raises, or returns values that are not finite; no ``clients.on_error`` passes over it.
        """


def _call(
    kind: Literal["mean", "each", "map"],
    procedure: Procedure,
    cohort: Sequence[int],
    broadcast: Tree,
    payloads: Mapping[int, Tree] | None,
    counted: bool = True,
    required: bool | None = None,
    down: Mapping[int, int] | None = None,
) -> Call:
    return Call(name_of(procedure), kind, tuple(cohort), broadcast, payloads or {}, counted, required, down)


def name_of(procedure: Procedure) -> str:
    """Returns a procedure's name.

    Raises:
        MethodError: when it is not asynchronous.
    """
    name: str = procedure.__name__
    if is_plain(procedure, name):
        raise MethodError(NOT_ASYNCHRONOUS.format(name) + own_definition(procedure))
    return name


def is_plain(procedure: Callable[..., Any], name: str) -> bool:
    """Returns whether a function is neither a coroutine nor, as by a decorator, around something that may be one."""
    decorated = hasattr(procedure, "__wrapped__") or procedure.__name__ != name
    return not decorated and not inspect.iscoroutinefunction(procedure)


def merge(total: ExactSum, part: ExactSum, round: int, procedure: str) -> None:
    """Adds a part to a sum over all clients.

    Args:
        total: changed.
        part: not used afterwards.
        round: for errors, 0-indexed.
        procedure: for errors.

    Raises:
        ClientError: when the clients' contributions are too large together, which no single one is to blame for.
        MethodError: when they are of different structures.
    """
    try:
        total.merge(part)
    except (OverflowError, ValueError) as error:
        raise no_sum(error, round, procedure) from error


def no_sum(error: OverflowError | ValueError, round: int, procedure: str) -> ClientError | MethodError:
    """Returns why clients' contributions make no sum together: they are too large, or the method's are unlike.

    Args:
        error: of the sum.
        round: 0-indexed.
        procedure: of the method.
    """
    if isinstance(error, OverflowError):
        return ClientError(f"the clients, round {round + 1}, {procedure}: {error}")
    return MethodError(
        f"round {round + 1}, {procedure}: {error}: it must return tensors of the same names, shapes and types for every"
        " client, or name groups of clients that do (Weighted.group, Clients.means)"
    )
