"""Runs clients' procedures: gathers what they await, has the engine do it, sends the results back in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayfl.engine.requests import Request
from rayfl.errors import as_error


class Executor(Protocol):
    """Whoever does the work: the engine, or a test's stand-in."""

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """One reply a request; an exception as a reply is raised inside the procedure that asked."""
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
) -> dict[int, Any]:
    """Runs procedures in lock-step to their ends.

    Args:
        procedures: started by this call, keyed by client id.
        executor: does all requests that are pending at a time in one call, so it can group equal work.
        turn_to: called with the clients whose code runs next.

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

    for client in procedures:
        advance(client, None)
    while waiting:
        pending = dict(waiting)
        waiting.clear()
        turn_to(tuple(pending))
        for client, reply in zip(pending, executor.execute(list(pending.values())), strict=True):
            advance(client, reply)
    return results
