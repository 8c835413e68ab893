"""What is known of clients when those of a round are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rayfl.params import Tree

_KEY = "(selection)"
"""Where the memory of rules has what a strategy remembers: a word that no rule of aggregation begins with."""

_ARRAYS = ("losses", "squares", "times", "last")
"""What is kept from round to round."""

_NEVER = -1


@dataclass(frozen=True)
class Known:
    """What a strategy chooses a round's clients by.

    Arrays have an entry for each client that may train, in the order of their numbers. Clients that failed in a round
    and were left out (``clients.on_error``) count as if they had not been chosen.

    Attributes:
        round: t, 0-indexed.
        able: the clients that can be asked, ascending; with simulated devices those that are available.
        size: how many are wanted, m; no more than there are in ``able``.
        samples: n_k, int64.
        losses: mean loss of a client's training samples at the model that it was last asked about, float64; nan for one
            that was never asked, or whose loss could not be found.
        squares: mean of the squares of these losses, float64; nan likewise.
        times: how many rounds it has taken part in, int64.
        last: the last round that it took part in, int64, 0-indexed; -1 for none.
        seconds: how long a round takes on its simulated device, float64; nan where nothing is simulated.
        unanswered: after the round: the clients that were asked and took no part, ascending; empty before it, and where
            nobody took part, which tells nothing of any.
        own: what the strategy itself remembers; empty at first.
        generator: of the round, for random choices.
    """

    round: int
    able: np.ndarray
    size: int
    samples: np.ndarray
    losses: np.ndarray
    squares: np.ndarray
    times: np.ndarray
    last: np.ndarray
    seconds: np.ndarray
    unanswered: tuple[int, ...] = ()
    own: Tree = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.Generator(np.random.Philox(0)))

    @classmethod
    def before(cls, samples: Sequence[int] | np.ndarray) -> Known:
        """What is known before the first round.

        Args:
            samples: n_k of all clients that may train.
        """
        counts = np.asarray(samples, np.int64)
        unknown = np.full(len(counts), np.nan)
        return cls(
            0,
            np.arange(len(counts)),
            len(counts),
            counts,
            unknown,
            unknown,
            np.zeros(len(counts), np.int64),
            np.full(len(counts), _NEVER, np.int64),
            unknown,
        )

    @classmethod
    def remembered(cls, memory: Tree, strategy: str, samples: Sequence[int] | np.ndarray) -> Known:
        """What is known from earlier rounds, see :meth:`memory`; a fork may go on with another strategy."""
        found = memory.get(f"{_KEY} {strategy}")
        if found is None:
            return cls.before(samples)
        arrays = {name: found[name].numpy() for name in _ARRAYS}
        return replace(cls.before(samples), **arrays, own=found.get("own", {}))

    def memory(self, strategy: str) -> Tree:
        """What a commit keeps of it, beside what a rule of aggregation remembers."""
        arrays: Tree = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        return {f"{_KEY} {strategy}": {**arrays, **({"own": self.own} if self.own else {})}}

    def told(self, losses: Mapping[int, tuple[float, float]]) -> Known:
        """The same with losses of some clients, and the means of their squares; those of others stay."""
        own, squares = self.losses.copy(), self.squares.copy()
        for client, (loss, square) in losses.items():
            own[client], squares[client] = loss, square
        return replace(self, losses=own, squares=squares)

    def after(self, cohort: Sequence[int]) -> Known:
        """The same after the round, in which these clients have taken part."""
        times, last, there = self.times.copy(), self.last.copy(), list(cohort)
        times[there] += 1
        last[there] = self.round
        return replace(self, times=times, last=last)
