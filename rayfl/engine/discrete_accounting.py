"""What integers of noise in a sum promise: Renyi divergences of Skellam noise and of sums of discrete Gaussians.

Two data sets are neighbours if a client sends its change in one of them and no change in the other. It is there in
both, and its noise is. The sum of the noise is then as large as planned, and there is nothing random about who is
sampled: the server, against which the promise is, runs the protocol with the clients of a round and knows them. So
amplification by sampling is not counted.

Sources: Agarwal, Kairouz, Liu, NeurIPS 2021 (Skellam, orders that are integers); Kairouz, Liu, Steinke, ICML 2021,
Theorem 1 and Proposition 14 (sums of discrete Gaussians). The bounds are those of the authors' code
(google-research/federated, distributed_dp), which was read; the texts were not at hand.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import numpy as np

from rayfl.aggregation.discrete_sums import padded, rounded_norm, rounded_sum
from rayfl.aggregation.secure_sum import step_of
from rayfl.messages.compressors import SecureAggregation
from rayfl.messages.privacy import PrivacyConfig

_WHOLE = np.array([*range(2, 65), *range(68, 129, 4), 160, 192, 256, 384, 512, 768, 1024, 2048, 4096], dtype=float)
_BROKEN = np.array([1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.5, 3.5, 4.5])
"""Orders of Renyi divergences; for Skellam noise a bound is known for those that are integers."""


def skellam_renyi(orders: np.ndarray, norm: float, total: float, variance: float) -> np.ndarray:
    """Returns bounds of Renyi divergences of vectors of integers with Skellam noise.

    It is alpha D2^2 / (2 mu) + min(((2 alpha - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu)).

    Args:
        orders: alpha, integers above 1.
        norm: D2, the largest Euclidean norm of the difference of two vectors.
        total: D1, its largest sum of magnitudes.
        variance: mu, of the noise of each entry.
    """
    more = ((2 * orders - 1) * norm**2 + 6 * total) / (4 * variance**2)
    found: np.ndarray = orders * norm**2 / (2 * variance) + np.minimum(more, 3 * total / (2 * variance))
    return found


def excess(deviation: float, count: int) -> float:
    """Returns tau, twice what the logarithms of two probabilities differ by at most.

    They are those of a sum of discrete Gaussians, and of one discrete Gaussian of their variance.

    Args:
        deviation: of one of them.
        count: n, how many.
    """
    k = np.arange(1, count, dtype=float)
    return float(10 * np.exp(-2 * (math.pi * deviation) ** 2 * k / (k + 1)).sum())


def gaussian_renyi(
    orders: np.ndarray, norm: float, total: float, deviation: float, count: int, entries: int
) -> np.ndarray:
    """Returns bounds of Renyi divergences of vectors of integers with sums of discrete Gaussians.

    With s^2 = n deviation^2 it is the least of alpha D2^2 / (2 s^2) + tau d, of alpha (D2^2 / s^2 + 2 tau D1 / s +
    tau^2 d) / 2, and of alpha (D2 / s + tau sqrt(d))^2 / 2.

    Args:
        orders: alpha, above 1.
        norm: D2, the largest Euclidean norm of the difference of two vectors.
        total: D1, its largest sum of magnitudes.
        deviation: of the noise of each entry that one client adds.
        count: n, clients that add noise.
        entries: d.
    """
    tau, all_of_them = excess(deviation, count), math.sqrt(count) * deviation
    once, sums = norm / all_of_them, total / all_of_them
    one = orders * once**2 / 2 + tau * entries
    two = orders * (once**2 + 2 * sums * tau + tau**2 * entries) / 2
    three = orders * (once + math.sqrt(entries) * tau) ** 2 / 2
    return np.minimum(np.minimum(one, two), three)


@lru_cache(maxsize=1 << 10)
def distributed_epsilon(
    privacy: PrivacyConfig, rule: SecureAggregation, cohort: int, clients: int, summed: int, times: int
) -> float:
    """Returns epsilon of (epsilon, delta)-differential privacy of a client, against one who sees the rounds' sums.

    Args:
        privacy: its section, with a ``mechanism`` of integers.
        rule: the section ``compression``; its levels are the integers.
        cohort: n, the clients of a round; the most, where that changes.
        clients: K.
        summed: P, numbers of a message at most.
        times: in how many rounds the client took part.

    Raises:
        ImportError: opacus is not installed.
    """
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if not times:
        return 0.0
    assert privacy.clip_norm is not None
    step, entries = step_of(rule.clip, rule.bits), padded(summed)
    norm = rounded_norm(privacy.clip_norm / step, entries)
    total, deviation = rounded_sum(norm, entries), privacy.noise_multiplier * privacy.clip_norm / step
    if privacy.mechanism == "skellam":
        orders = _WHOLE
        found = skellam_renyi(orders, norm, total, deviation**2)
    else:
        orders = np.sort(np.concatenate([_BROKEN, _WHOLE]))
        found = gaussian_renyi(orders, norm, total, deviation / math.sqrt(cohort), cohort, entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an order at the edge, for very little or very much noise
        return max(float(get_privacy_spent(orders=orders, rdp=times * found, delta=privacy.delta_of(clients))[0]), 0.0)
