"""Runs clients' procedures: gathers what they await, has the engine do it, sends the results back in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayfl.engine.requests import GradientRequest, OutputRequest, Request
from rayfl.errors import as_error


class Executor(Protocol):
    """What does the work: the engine, or a test's stand-in."""

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """Returns one reply a request; an exception as a reply is raised inside the procedure that asked."""
        ...


@dataclass(frozen=True)
class Ask:
    """``await Ask(request)`` suspends a procedure until the engine has done the request."""

    request: Request

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self.request)


def run_procedures(
    procedures: Mapping[int, Coroutine[Request, Any, Any]],
    executor: Executor,
    turn_to: Callable[[Sequence[int]], None] = lambda clients: None,
    after: Callable[[int], None] = lambda client: None,
) -> dict[int, Any]:
    """Runs procedures in lock-step to their ends.

    Args:
        procedures: started by this call, keyed by client id.
        executor: does all local updates that are pending at a time in one call, so it can group equal work.
        turn_to: called with the clients whose code runs next.
        after: called with a client whenever code of its own has run. What it raises ends all procedures.

    Returns:
        What each procedure returned, or the exception it raised, by client id.
    """
    results: dict[int, Any] = {}
    waiting: dict[int, Request] = {}

    def advance(client: int, reply: Any) -> None:
        procedure = procedures[client]
        turn_to((client,))
        try:
            waiting[client] = procedure.throw(reply) if isinstance(reply, Exception) else procedure.send(reply)
        except StopIteration as end:
            results[client] = end.value
        except BaseException as error:
            results[client] = as_error(error)
        after(client)

    try:
        for client in procedures:
            advance(client, None)
        while waiting:
            pending = dict(waiting)
            waiting.clear()
            replies: dict[int, Any] = {}
            for clients in _together(pending):
                turn_to(tuple(clients))
                replies |= zip(clients, executor.execute([pending[client] for client in clients]), strict=True)
                after(clients[0])
            for client in pending:
                advance(client, replies[client])
    finally:
        for procedure in procedures.values():
            procedure.close()
    return results


def _together(pending: Mapping[int, Request]) -> Iterator[list[int]]:
    """The clients whose requests are executed in one call: nothing but local updates gains by that."""
    alone = [client for client, request in pending.items() if isinstance(request, GradientRequest | OutputRequest)]
    updates = [client for client in pending if client not in set(alone)]
    if updates:
        yield updates
    yield from ([client] for client in alone)
