"""Epsilon of normal mechanisms one after the other, by the accountants of opacus."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import lru_cache

from rayfl.messages.privacy import Accountant

Mechanism = tuple[float, float, int]
"""The standard deviation of the noise over the sensitivity, the rate of Poisson sampling, and how many there are."""

_log = logging.getLogger("rayfl")


@lru_cache(maxsize=1 << 14)
def spent(mechanisms: Sequence[Mechanism], delta: float, accountant: Accountant) -> float:
    """Returns epsilon of (epsilon, delta)-differential privacy.

    Sources: Mironov, Talwar, Zhang (2019) for Renyi divergences (``rdp``); Gopi, Lee, Wutschitz (NeurIPS 2021) for the
    numerical composition of privacy loss random variables (``prv``), which is within 0.01 of the exact value. Where
    the latter finds no grid fine enough, as with hardly any noise, it is that of the former.

    Args:
        mechanisms: a tuple of them.
        delta: the probability.
        accountant: ``privacy.accountant``.

    Raises:
        ImportError: opacus is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the orders, one is at the edge for very little or very much noise
        if accountant == "prv":
            from opacus.accountants import PRVAccountant

            numerical = PRVAccountant()
            numerical.history = list(mechanisms)
            try:
                return max(float(numerical.get_epsilon(delta)), 0.0)
            except (RuntimeError, ValueError, FloatingPointError, MemoryError) as error:
                _log.warning("privacy.accountant=prv finds no epsilon (%s): it is that of rdp", error)
        return _renyi(mechanisms, delta)


def _renyi(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Returns what opacus finds with all of its orders, of which it needs to see few."""
    from opacus.accountants import RDPAccountant

    found = RDPAccountant()
    found.history = list(mechanisms)
    orders = found.DEFAULT_ALPHAS
    # those that are no integers take most of the time, and the best one is beside the best integer
    whole = [order for order in orders if float(order).is_integer()]
    epsilon, best = found.get_privacy_spent(delta=delta, alphas=whole)
    near = [order for order in orders if abs(order - best) <= 2]
    return max(float(min(epsilon, found.get_epsilon(delta, alphas=near))), 0.0)
