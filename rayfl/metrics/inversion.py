"""How near reconstructed samples are to the true ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment


@dataclass(frozen=True)
class Matched:
    """Reconstructions, each beside a sample of its own, so that the sum of all errors is smallest.

    Attributes:
        places: by sample, which reconstruction it has; int64 of shape (n,).
        errors: by sample, the mean squared error over its numbers; shape (n,).
    """

    places: np.ndarray
    errors: np.ndarray


def matched(originals: np.ndarray, reconstructions: np.ndarray) -> Matched:
    """Returns the assignment of reconstructions to samples with the smallest mean squared error.

    A gradient of several samples does not say in which order they are, so that their order must not count.

    Args:
        originals: shape (n, ...).
        reconstructions: of the same shape.
    """
    true, found = (part.reshape(len(part), -1).astype(np.float64) for part in (originals, reconstructions))
    errors = np.stack([np.square(found - one).mean(1) for one in true])
    rows, places = linear_sum_assignment(errors)
    return Matched(places, errors[rows, places])


def psnr(errors: np.ndarray) -> np.ndarray:
    """Returns the peak signal-to-noise ratio in dB of mean squared errors of images in [0, 1]; inf for no error."""
    with np.errstate(divide="ignore"):
        found: np.ndarray = -10 * np.log10(errors)
    return found
