"""Which of several values, such as ranks or widths, a client's device allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rayfl.engine.round_context import RoundContext

T = TypeVar("T")


def in_turn(values: Sequence[T], client: int) -> T:
    """The value of client k at place k, and again from the first."""
    return values[client % len(values)]


def drawn(
    values: Sequence[T],
    stream: str,
    client: int,
    context: RoundContext,
    shares: Sequence[float] | None = None,
    round: int | None = None,
) -> T:
    """A value drawn for a client.

    Args:
        values: to draw from.
        stream: name of the random stream.
        client: its number; of newcomers too.
        context: has the streams.
        shares: how likely each value is, of any sum; None: all alike.
        round: for a draw in each round; None: one draw for the run.
    """
    generator = context.streams.generator(stream, client=client, **({} if round is None else {"round": round}))
    if shares is None:
        return values[int(generator.integers(len(values)))]
    bounds = np.cumsum(shares)
    place = int(np.searchsorted(bounds, generator.random() * bounds[-1], side="right"))
    return values[min(place, len(values) - 1)]
