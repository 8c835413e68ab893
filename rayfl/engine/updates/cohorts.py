"""Which clients are sampled in a round: a function of seed, round and the options of the section ``train``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np

from rayfl.randomness import RandomStreams

Sampling = Literal["fixed", "poisson", "cyclic"]


def cohort_of(
    streams: RandomStreams,
    round: int,
    clients: int,
    wanted: int | Literal["all"],
    least: int | None = None,
    sampling: Sampling = "fixed",
) -> list[int]:
    """Returns the clients of a round, ascending; the same for every method.

    Args:
        streams: the experiment's randomness.
        round: t, 0-indexed.
        clients: K, how many may be sampled.
        wanted: m, ``train.clients_per_round``.
        least: ``train.min_clients_per_round``.
        sampling: ``fixed``, m different clients; ``poisson``, each client with the probability m / K by itself;
            ``cyclic``, the next m in an order of all clients that is drawn once, from its end on from its beginning.
    """
    size = clients if wanted == "all" else min(wanted, clients)
    if sampling == "poisson":
        met = streams.generator("sampling", round).random(clients) < size / clients
        return [int(client) for client in met.nonzero()[0]]
    if sampling == "cyclic":
        order = streams.generator("sampling").permutation(clients)
        return sorted(int(client) for client in order[(round * size + np.arange(size)) % clients])
    return streams.drawn("sampling", round, clients, size, None if least is None else min(least, size))


@lru_cache(maxsize=4)
def attendances(
    streams: RandomStreams,
    rounds: int,
    clients: int,
    wanted: int | Literal["all"],
    least: int | None = None,
    sampling: Sampling = "fixed",
) -> tuple[int, ...]:
    """Returns in how many of the first rounds each client is sampled; arguments are those of :func:`cohort_of`.

    All rounds are drawn, which takes time in long runs: what was drawn last is kept, since the checks of a run, its log
    and its summary ask for the same.
    """
    drawn = (cohort_of(streams, round, clients, wanted, least, sampling) for round in range(rounds))
    attended = Counter(client for cohort in drawn for client in cohort)
    return tuple(attended[client] for client in range(clients))


def cyclic_attendances(clients: int, size: int, rounds: int) -> Iterator[np.ndarray]:
    """Yields when clients take part in cyclic cohorts: one array of bool for each pattern there is, shape (rounds,).

    A client takes part every K/m rounds, rounded down or up. When it does depends on its place in the order, and is the
    same for places between which no cohort begins.

    Args:
        clients: K.
        size: m, up to K.
        rounds: T.
    """
    begins = np.arange(rounds, dtype=np.int64) * size
    for place in np.unique(np.append(begins, rounds * size) % clients):
        yield (place - begins) % clients < size
