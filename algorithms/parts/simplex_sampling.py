"""Uniform points of the standard simplex, and of its intersection with an L1 ball.

With centre c and a point c + delta of the ball ``||delta||_1 <= rho``, the entries of delta sum to zero: the
positive ones sum to s <= rho / 2, the negative ones to -s. Uniformity splits into independent parts: which
coordinates are positive, how s is distributed, and how s is shared among the coordinates of either sign.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# L1 distance between two points of a simplex never exceeds this: a ball of the radius holds the whole simplex.
_DIAMETER = 2.0
_BLOCK = 4096
MAX_REJECTIONS = 1_000_000
"""Rejected points after which a walk through the region takes the place of rejection sampling."""
_STEPS_PER_DIMENSION = 200
_MAX_SHRINKS = 64


def sample_simplex(generator: np.random.Generator, dimension: int, count: int) -> Array:
    """Uniform points of the standard simplex (Dirichlet with concentration 1).

    Args:
        generator: source of randomness.
        dimension: number of coordinates d.
        count: number of points.

    Returns:
        Points of shape (count, d).
    """
    if dimension == 1:
        return np.ones((count, 1))
    parts = generator.standard_exponential((count, dimension))
    points: Array = parts / parts.sum(1, keepdims=True)
    return points


def sample_ball(generator: np.random.Generator, center: Array, radius: float, count: int) -> Array:
    """Uniform points of ``{alpha in simplex : ||alpha - center||_1 <= radius}``.

    Proposals are uniform in the ball cut by those faces of the simplex that the centre lies on, and are accepted
    when no other coordinate turns negative. At most a million are rejected; what is missing then comes from
    hit-and-run walks.

    Args:
        generator: source of randomness.
        center: a point of the simplex, shape (d,). A coordinate counts as zero only if it is exactly 0.
        radius: rho; from 2 on the points are those of :func:`sample_simplex`, draw for draw.
        count: number of points.

    Returns:
        Points of shape (count, d).
    """
    dimension = len(center)
    if dimension == 1 or radius >= _DIAMETER:
        return sample_simplex(generator, dimension, count)
    if radius == 0:
        return np.tile(center, (count, 1))
    probabilities = pattern_probabilities(dimension, int((center == 0).sum()))
    accepted: list[Array] = []
    missing, rejected, block = count, 0, count
    while missing and rejected < MAX_REJECTIONS:
        points = center + propose(generator, center, radius, probabilities, block)
        inside = points[(points >= 0).all(1)]
        rejected += block - len(inside)
        accepted.append(inside[:missing])
        missing -= len(accepted[-1])
        # a low acceptance shows after the first block; from then on proposals come by the thousand
        block = _BLOCK
    if missing:
        accepted.append(_hit_and_run(generator, center, radius, missing))
    return np.concatenate(accepted) if accepted else np.zeros((0, dimension))


def sample_ball_legacy(generator: np.random.Generator, center: Array, radius: float, count: int) -> Array:
    """Returns what the public FLOCO code draws: neither uniform nor on the simplex; only to reproduce its numbers.

    A direction uniform in the cube and normalized to L1 length 1, times a radius uniform in [0, rho], is added
    to the centre: coordinates may be negative and need not sum to 1.
    """
    direction = generator.uniform(-1, 1, (count, len(center)))
    direction /= np.abs(direction).sum(1, keepdims=True)
    points: Array = center + direction * generator.uniform(0, radius, (count, 1))
    return points


def pattern_probabilities(dimension: int, zeros: int = 0) -> Array:
    """The law of p, the number of coordinates in which a uniform point of the ball exceeds its centre.

    p positive and q = d - p negative coordinates can be shared s in a volume proportional to
    1 / ((p - 1)! (q - 1)!), and zeros of the centre must be among the positive ones.

    Args:
        dimension: d >= 2.
        zeros: coordinates of the centre that are zero, at most d - 1.

    Returns:
        P(p) for p = 0..d, shape (d + 1,).
    """
    weights = np.zeros(dimension + 1)
    for p in range(max(1, zeros), dimension):
        choices = math.comb(dimension - zeros, p - zeros)
        # times (d - 2)!, a constant that keeps the factors integers: binomial(d - 2, p - 1) instead of factorials
        weights[p] = choices * math.comb(dimension - 2, p - 1)
    law: Array = weights / weights.sum()
    return law


def propose(generator: np.random.Generator, center: Array, radius: float, probabilities: Array, count: int) -> Array:
    """Returns uniform differences from the centre within the ball, non-negative where the centre is zero.

    Args:
        generator: draws them.
        center: shape (d,).
        radius: of the L1 ball.
        probabilities: what :func:`pattern_probabilities` returns, shape (d + 1,).
        count: how many.

    Returns:
        Shape (count, d).
    """
    dimension = len(center)
    # without the last two entries (P(d - 1), and P(d) = 0) no rounding of the sum can lead to p = d
    positives = np.searchsorted(probabilities.cumsum()[: dimension - 1], generator.random(count), side="right")
    keys = generator.random((count, dimension))
    keys[:, center == 0] = -1.0
    ranks = keys.argsort(1).argsort(1)
    rises = ranks < positives[:, None]
    parts = generator.standard_exponential((count, dimension))
    rising, falling = np.where(rises, parts, 0.0), np.where(rises, 0.0, parts)
    shares = rising / rising.sum(1, keepdims=True) - falling / falling.sum(1, keepdims=True)
    mass = radius / 2 * generator.random((count, 1)) ** (1 / (dimension - 1))
    differences: Array = mass * shares
    return differences


def _hit_and_run(generator: np.random.Generator, center: Array, radius: float, count: int) -> Array:
    """Ends of ``count`` independent hit-and-run walks in the region; uniform up to the mixing of the walk.

    The walks start half-way between the centre and where the segment to the barycentre leaves the region: a
    centre that needs this fallback is so close to several faces that walks from itself would hardly move.
    """
    dimension = len(center)
    inward = 1 / dimension - center
    reach = np.abs(inward).sum()
    offset = inward * min(0.5, radius / 2 / reach) if reach else inward
    offsets = np.tile(offset, (count, 1))
    for _ in range(_STEPS_PER_DIMENSION * dimension):
        directions = generator.standard_normal((count, dimension))
        directions -= directions.mean(1, keepdims=True)
        offsets = offsets + _step(generator, center, radius, offsets, directions) * directions
    # a step of full length ends on a face up to rounding
    ends = np.maximum(center + offsets, 0.0)
    points: Array = ends / ends.sum(1, keepdims=True)
    return points


def _step(generator: np.random.Generator, center: Array, radius: float, offsets: Array, directions: Array) -> Array:
    """Signed step lengths, uniform on each line's part inside the region; shape (count, 1).

    The part inside the simplex is known; draws outside the ball shrink it from the side they fall on, which
    never removes anything inside the (convex) ball.
    """
    crossings = -(center + offsets) / directions
    high = np.where(directions < 0, crossings, np.inf).min(1)
    low = np.where(directions > 0, crossings, -np.inf).max(1)
    steps = np.zeros(len(offsets))
    open_rows = np.arange(len(offsets))
    for _ in range(_MAX_SHRINKS):
        lengths = low[open_rows] + (high - low)[open_rows] * generator.random(len(open_rows))
        distances = np.abs(offsets[open_rows] + lengths[:, None] * directions[open_rows]).sum(1)
        inside = distances <= radius
        steps[open_rows[inside]] = lengths[inside]
        open_rows, lengths = open_rows[~inside], lengths[~inside]
        high[open_rows] = np.where(lengths >= 0, lengths, high[open_rows])
        low[open_rows] = np.where(lengths < 0, lengths, low[open_rows])
        if not len(open_rows):
            break
    # a walk that rounding has put on the boundary may find nothing: it stays for this step
    return steps[:, None]
