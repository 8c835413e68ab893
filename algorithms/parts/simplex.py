"""Points of the standard simplex that stand for clients: principal coordinates, projection, spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MIN_DISTANCE = 1e-4
BLOCK_ELEMENTS = 2**22
"""Elements of a float64 block of all clients' signals: 32 MiB whatever the model."""
# Loadings that differ by less are equal but for rounding (the head gradients of two classes are opposite).
_TIE = 1e-6
_ROUND_OFF = 1e-12
# Energies that differ by a smaller share are equal.
_EQUAL = 1e-9


def project_onto_simplex(rows: Array, scale: float) -> Array:
    """Euclidean projection of every row onto ``{beta >= 0, sum(beta) = scale}``, by sorting.

    Args:
        rows: points of shape (n, d).
        scale: z > 0.

    Returns:
        Projections of shape (n, d).
    """
    descending = -np.sort(-rows, axis=1)
    thresholds = (descending.cumsum(1) - scale) / np.arange(1, rows.shape[1] + 1)
    # the condition holds for the r largest entries and for no other, and always for the first
    support = (descending > thresholds).sum(1).clip(min=1)
    chosen = np.take_along_axis(thresholds, support[:, None] - 1, axis=1)
    projected: Array = np.maximum(rows - chosen, 0.0)
    return projected


def principal_coordinates(signals: Sequence[NDArray[np.floating]], components: int) -> Array:
    """Coordinates of K signals along their first principal components, with determined signs.

    Computed in float64 from the K x K Gram matrix of the centred signals, which are read in blocks of features.
    Each component's largest loading by absolute value is positive (of equal ones, the first).

    Args:
        signals: K arrays of one shape.
        components: how many coordinates, at most K. Components without variance give zeros.

    Returns:
        Coordinates of shape (K, components), variances non-increasing.
    """
    count = len(signals)
    gram = np.zeros((count, count))
    for block in _centered_blocks(signals):
        gram += block @ block.T
    from scipy.linalg import eigh  # SciPy loads slowly, and only two methods need it

    variances, vectors = eigh(gram, subset_by_index=[count - components, count - 1])
    variances, vectors = variances[::-1], vectors[:, ::-1]
    # below this an eigenvalue is rounding, and its vector arbitrary
    significant = variances > variances[0] * count * np.finfo(np.float64).eps
    unsigned: Array = vectors * np.sqrt(np.where(significant, variances, 0.0))
    coordinates: Array = unsigned * _signs(signals, unsigned)
    return coordinates


def riesz_energy(points: Array) -> float:
    """Riesz energy: the sum over pairs of rows of their distance (at least 1e-4) to the power -2.

    Args:
        points: shape (n, d).
    """
    from scipy.spatial.distance import pdist

    squared = pdist(points, "sqeuclidean")
    return float((1.0 / np.maximum(squared, _MIN_DISTANCE**2)).sum())


def scale_candidates(kind: Literal["linear", "log"]) -> Array:
    """The 1,000 scales z in [1e-4, 1] that are tried, ascending, equally spaced or equally spaced in log z."""
    return np.linspace(1e-4, 1, 1000) if kind == "linear" else np.geomspace(1e-4, 1, 1000)


def spread_on_simplex(
    coordinates: Array, candidates: Array, energy_on: Literal["alpha", "beta"] = "alpha"
) -> tuple[float, Array]:
    """Projects clients onto the standard simplex at the scale that spreads them best.

    Args:
        coordinates: kappa, shape (K, d).
        candidates: scales z to try.
        energy_on: minimize the Riesz energy of the points themselves (alpha) or of z times the points (beta).

    Returns:
        The first candidate of least energy, and the points of shape (K, d), which are non-negative and sum to 1.
        Energies that differ by round-off alone are equal: once every projection lies inside the simplex, those of beta
        all are.
    """
    best_energy, best_scale, best = np.inf, float(candidates[0]), project_onto_simplex(coordinates, candidates[0])
    for scale in candidates:
        projected = project_onto_simplex(coordinates, scale)
        energy = riesz_energy(projected / scale if energy_on == "alpha" else projected)
        if energy < best_energy * (1 - _EQUAL):
            best_energy, best_scale, best = energy, float(scale), projected
    points = best / best_scale
    # coordinates that are zero but for rounding would put a client just off the face it belongs on
    points[points < _ROUND_OFF] = 0.0
    return best_scale, points / points.sum(1, keepdims=True)


def _signs(signals: Sequence[NDArray[np.floating]], coordinates: Array) -> Array:
    """+1 or -1 a component, from its loadings, which are the blocks' products with the coordinates."""
    largest = np.zeros(coordinates.shape[1])
    for block in _centered_blocks(signals):
        largest = np.maximum(largest, np.abs(coordinates.T @ block).max(1))
    signs = np.zeros(coordinates.shape[1])
    for block in _centered_blocks(signals):
        loadings = coordinates.T @ block
        first = (np.abs(loadings) >= (largest * (1 - _TIE))[:, None]).argmax(1)
        values = loadings[np.arange(len(first)), first]
        found = (signs == 0) & (np.abs(values) >= largest * (1 - _TIE))
        signs[found] = np.where(values[found] < 0, -1.0, 1.0)
    return signs


def _centered_blocks(signals: Sequence[NDArray[np.floating]]) -> Iterator[Array]:
    """Blocks (K, some features) of the signals minus their mean over clients, in float64."""
    rows = [np.asarray(signal).reshape(-1) for signal in signals]
    width = max(1, BLOCK_ELEMENTS // len(rows))
    for start in range(0, len(rows[0]), width):
        block = np.stack([row[start : start + width] for row in rows]).astype(np.float64)
        yield block - block.mean(0)
