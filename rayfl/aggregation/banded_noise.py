"""Noise of rounds that is subtracted again, in part, by those that follow: the banded square root factorization.

A server adds up what rounds give it. With the matrix A of ones on and below its diagonal, and A = B C, it may release
C x + z in place of each round's sum x_t alone, with independent noise z, and knows A x + B z from it: the noise of
round t is then entry t of C^(-1) z. C is the square root of A, of which b diagonals are kept. It is a Toeplitz matrix
with the entries c_j = (2j)! / (4^j j!^2), 0 <= j < b, so that it is the same for any number of rounds. With b = 1 noise
is independent.

Nothing is stored: a round draws again what earlier ones drew, as far back as it counts in float64.

Sources: Kalinin, Lampert: Banded Square Root Matrix Factorization for Differentially Private Model Training, NeurIPS
2024; Choquette-Choo et al.: (Amplified) Banded Matrix Factorization: A Unified Approach to Private Training, NeurIPS
2023; Denisov, McMahan, Rush, Smith, Thakurta: Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams, NeurIPS 2022, for rounds that depend on what was released. The papers' texts were not at
hand.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rayfl.aggregation.tree_noise import Draw
from rayfl.randomness import RandomStreams

_NEGLIGIBLE = 2.0**-60
"""Smaller shares of a round's own noise would not change a sum in float64."""


def banded_noise(streams: RandomStreams, round: int, bands: int) -> Draw:
    """Returns what draws the noise of a round, in multiples of the deviation of the independent noise z.

    Tensors of other names or shapes have independent noise.

    Args:
        streams: the experiment's randomness.
        round: t, 0-indexed.
        bands: b.
    """
    found = shares(round, bands)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        total = np.zeros(shape)
        for back, share in enumerate(found.tolist()):
            if abs(share) >= _NEGLIGIBLE:
                generator = streams.generator(f"privacy.banded.{path}.{shape}", round - back)
                total += share * generator.standard_normal(shape)
        return total

    return draw


def coefficients(bands: int) -> np.ndarray:
    """The entries c_0, ..., c_(b-1) of a column of C from the diagonal down, float64."""
    steps = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def shares(round: int, bands: int) -> np.ndarray:
    """How a round's noise is made of z: the share of z of this round, of the one before, and so on; float64.

    They are the entries of a column of C^(-1) from the diagonal down, in number ``round`` + 1.
    """
    return _inverse(bands, 1 << round.bit_length())[: round + 1]


@lru_cache(maxsize=8)
def _inverse(bands: int, count: int) -> np.ndarray:
    """The first coefficients of the power series 1 / (c_0 + c_1 x + ... + c_(b-1) x^(b-1))."""
    column, found = coefficients(bands), np.zeros(count)
    found[0] = 1.0
    for place in range(1, count):
        before = found[max(place - bands + 1, 0) : place][::-1]
        found[place] = -float(column[1 : 1 + len(before)] @ before)
    return found


def squared_sensitivity(attended: np.ndarray, bands: int) -> float:
    """Returns the squared Euclidean norm of what one client changes of C x, in units of C^2.

    It is largest where all of a client's changes point the same way, since C has no negative entries.

    Args:
        attended: whether the client takes part in each round, shape (rounds,).
        bands: b.
    """
    changed = np.convolve(attended.astype(np.float64), coefficients(bands))[: len(attended)]
    return float(changed @ changed)
