"""Directed graphs of who sends to whom, and the shares in which a client sends what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from algorithms.parts.topology import Links
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError

DirectedKind = Literal["one_peer", "random", "exponential", "ring"]


@dataclass(frozen=True)
class DirectedGraph:
    """Who sends to whom.

    Attributes:
        kind: ``ring`` and ``exponential`` are fixed over all clients, of which a round has the links among those that
            take part; ``one_peer`` and ``random`` are graphs of each round over those that take part.
        degree: to how many a client sends (``random``).
    """

    kind: DirectedKind
    degree: int

    @staticmethod
    def check(clients: int) -> None:
        """Refuses fewer than two clients.

        Args:
            clients: K.

        Raises:
            ConfigError: naming the fix.
        """
        if clients < 2:
            raise ConfigError(f"there is {clients} client, but it takes two to send models: raise dataset.num_clients")

    def of_round(self, context: RoundContext, cohort: Sequence[int]) -> Links:
        """Returns the links among the clients that take part in a round, in their order.

        Args:
            context: the round t.
            cohort: the clients, n of them. With ``one_peer`` each sends to the one 2^(t mod ceil(log2 n)) places ahead
                of it, so that all have the same model after log2 n rounds where n is a power of 2 and nobody trains.

        Returns:
            [i, j] says that i gets what j sends.
        """
        size = len(cohort)
        found = np.zeros((size, size), dtype=bool)
        if self.kind == "random":
            for row, client in enumerate(cohort):
                others = np.delete(np.arange(size), row)
                drawn = context.streams.generator("topology", context.round, client).permutation(others)
                found[drawn[: self.degree], row] = True
            return found
        numbers, whole = np.asarray(cohort), context.num_clients
        steps = [1]
        if self.kind == "one_peer":
            numbers, whole = np.arange(size), size
            steps = [2 ** (context.round % max((size - 1).bit_length(), 1))]
        elif self.kind == "exponential":
            steps = [2**power for power in range((whole - 1).bit_length())]
        for step in steps:
            found |= numbers[:, None] == (numbers[None, :] + step) % whole
        np.fill_diagonal(found, False)
        return found


def sent_shares(links: Links) -> np.ndarray:
    """P_ij = 1 / (1 + d_j) where j sends to i and where i = j, with d_j the number of those that j sends to.

    Columns sum to 1, so that nothing is lost on the way; rows need not.

    Args:
        links: [i, j] says that i gets what j sends, shape (n, n).

    Returns:
        float64 of shape (n, n).
    """
    with_own = links | np.eye(len(links), dtype=bool)
    shares: np.ndarray = with_own / with_own.sum(0)
    return shares
