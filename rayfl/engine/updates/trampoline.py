"""Runs clients' procedures: collects the requests they await, executes these together, sends replies back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayfl.engine.updates.requests import GradientRequest, OutputRequest, Request
from rayfl.errors import as_error


class Executor(Protocol):
    """Executes requests: the engine, or a test double."""

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """Returns one reply per request; an exception is raised inside the procedure that asked."""
        ...


@dataclass(frozen=True)
class Ask:
    """``await Ask(request)`` suspends a procedure until the engine has executed the request."""

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
        executor: is given all pending local updates in one call, so that it can group equal work.
        turn_to: called with the clients whose code runs next.
        after: called with a client whenever its code has run. An exception in it ends all procedures.

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
    """Yields the clients whose requests are executed in one call; only local updates gain by grouping."""
    alone = [client for client, request in pending.items() if isinstance(request, GradientRequest | OutputRequest)]
    updates = [client for client in pending if client not in set(alone)]
    if updates:
        yield updates
    yield from ([client] for client in alone)
