"""Shapley values of a game: by all coalitions, or from drawn permutations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from rayfl.valuation.game import Utility

_LEAST, _LAST, _TINY = 30, 10, 1e-12
"""Permutations before which values do not count as settled, how many of the last means are compared, and what keeps a
quotient finite; numbers of the authors' code of GTG-Shapley."""


def exact_values(utility: Utility) -> np.ndarray:
    """Returns the Shapley values, float64 of shape (n,), from the utilities of all 2^n coalitions.

    The value of i is the sum over coalitions S without i of |S|! (n - |S| - 1)! / n! (U(S + i) - U(S)).

    Args:
        utility: of n players.

    Raises:
        UndefinedUtilityError: a coalition has none.
    """
    n = utility.players
    worth = [utility.of(coalition) for coalition in range(1 << n)]
    factors = [math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n) for size in range(n)]
    found = np.empty(n)
    for player in range(n):
        bit = 1 << player
        without = [coalition for coalition in range(1 << n) if not coalition & bit]
        # exactly rounded sums, which do not depend on the order of clients
        found[player] = math.fsum(factors[one.bit_count()] * (worth[one | bit] - worth[one]) for one in without)
    return found


def drawn_values(
    utility: Utility,
    generator: np.random.Generator,
    passes: int,
    tolerance: float | None,
    within: float | None,
) -> tuple[np.ndarray, int, int]:
    """Returns estimates of the Shapley values, float64 of shape (n,), the permutations drawn, and places left out.

    A pass has n permutations, each of which begins with another player (guided sampling of GTG-Shapley); the others
    follow in random order. The mean of what players add is an unbiased estimate without ``within``.

    Args:
        utility: of n players.
        generator: of the permutations.
        passes: the most that are made.
        tolerance: passes end before where values have changed by less than this share, on average over players, over
            the last permutations; None: never.
        within: a permutation ends where U(all) is nearer than this to what its players have reached: those that follow
            add nothing; None: none does.

    Raises:
        UndefinedUtilityError: a coalition has none.
    """
    n, total, count, truncated = utility.players, np.zeros(utility.players), 0, 0
    means = deque[np.ndarray](maxlen=_LAST)
    for _ in range(passes):
        for first in range(n):
            others = np.array([player for player in range(n) if player != first], np.int64)
            order = [first, *generator.permutation(others).tolist()]
            truncated += _walk(utility, order, within, total)
            count += 1
            means.append(total / count)
        if tolerance is not None and count > _LEAST and _settled(means, tolerance):
            break
    return total / count, count, truncated


def _walk(utility: Utility, order: Sequence[int], within: float | None, total: np.ndarray) -> int:
    """Adds to ``total`` what players add in their order; returns how many of them were left out."""
    coalition, reached, all_of_them = 0, utility.of(0), utility.of(utility.everybody)
    for place, player in enumerate(order):
        if within is not None and abs(all_of_them - reached) < within:
            return len(order) - place
        coalition |= 1 << player
        before, reached = reached, utility.of(coalition)
        total[player] += reached - before
    return 0


def _settled(means: Sequence[np.ndarray], tolerance: float) -> bool:
    last = means[-1]
    return all(float(np.mean(np.abs(mean - last) / (np.abs(last) + _TINY))) <= tolerance for mean in means)


def without_one(utility: Utility) -> np.ndarray:
    """Returns what each player adds to all others, U(all) - U(all without it), float64 of shape (n,).

    Args:
        utility: of n players.

    Raises:
        UndefinedUtilityError: a coalition has none.
    """
    everybody = utility.everybody
    whole = utility.of(everybody)
    return np.array([whole - utility.of(everybody & ~(1 << player)) for player in range(utility.players)])
