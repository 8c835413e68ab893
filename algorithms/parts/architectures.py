"""Which of several architectures a client has, where no method or data say it."""

from __future__ import annotations

from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.tasks.base import Task


def architecture(client: int, candidates: int, context: RoundContext) -> int:
    """The number of a client's architecture, a draw of its own (stream ``init.architecture``).

    Args:
        client: its id.
        candidates: how many architectures there are.
        context: has the random streams.
    """
    return context.streams.integer("init.architecture", client=client) % candidates if candidates > 1 else 0


def task_of(client: Client) -> Task:
    """The candidate that a client has."""
    candidates = client.task.candidates
    return candidates[architecture(client.id, len(candidates), client.context)]
