"""The two phases of methods that begin as one thing and go on as another."""

from __future__ import annotations

import math

_ROUND_OFF = 1e-9
"""Without it 0.29 of 100 rounds, which is 28.999... in floating point, would be 28."""


def second_phase(round: int, rounds: int, share: float) -> bool:
    """Returns whether round t (0-indexed) of T belongs to the second phase, t >= floor(share T).

    Args:
        round: t.
        rounds: T.
        share: of the rounds, how many the first phase has.
    """
    return round >= math.floor(share * rounds + _ROUND_OFF)
