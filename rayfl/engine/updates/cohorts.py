"""Which clients are sampled in a round: a function of seed, round and the options of the section ``train``."""

from __future__ import annotations

from typing import Literal

from rayfl.randomness import RandomStreams

Sampling = Literal["fixed", "poisson"]


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
        sampling: ``fixed``, m different clients; ``poisson``, each client with the probability m / K by itself.
    """
    size = clients if wanted == "all" else min(wanted, clients)
    if sampling == "poisson":
        met = streams.generator("sampling", round).random(clients) < size / clients
        return [int(client) for client in met.nonzero()[0]]
    return streams.drawn("sampling", round, clients, size, None if least is None else min(least, size))
