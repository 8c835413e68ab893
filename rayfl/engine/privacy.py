"""What user-level differential privacy promises: epsilon, and how it is said."""

from __future__ import annotations

import importlib.util
import warnings

from rayfl.engine.updates.settings import TrainConfig
from rayfl.messages.privacy import PrivacyConfig

INSTALL = "pip install 'rayfl[privacy]'"
"""What to do without opacus."""


def promise(privacy: PrivacyConfig, train: TrainConfig, clients: int, rounds: int) -> str:
    """Returns what is promised after a number of rounds, in words.

    Args:
        privacy: its section; noise is added.
        train: says who is sampled.
        clients: K.
        rounds: rounds done.
    """
    if importlib.util.find_spec("opacus") is None:
        return f"Privacy: {INSTALL} to see epsilon."
    return (
        f"Privacy: epsilon = {epsilon(privacy, train, clients, rounds):.2f} at delta = {privacy.delta_of(clients):.2g} "
        f"for each client after {rounds} rounds, against one who sees all models of the server; scores are not private."
    )


def epsilon(privacy: PrivacyConfig, train: TrainConfig, clients: int, rounds: int) -> float:
    """Returns epsilon of (epsilon, delta)-differential privacy where data sets differ by one client, there or not.

    It is that of the Poisson-sampled normal mechanism (Mironov, Talwar, Zhang, 2019), by opacus. A round without any
    client adds no noise; the probability that there is one is taken from delta.

    Args:
        privacy: its section; noise is added.
        train: says who is sampled.
        clients: K.
        rounds: T.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its orders, one is at the edge for very little or very much noise
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(privacy.noise_multiplier, _rate(train, clients), rounds)]
        found: float = accountant.get_epsilon(privacy.delta_of(clients) - without_clients(train, clients, rounds))
    return float(found)


def without_clients(train: TrainConfig, clients: int, rounds: int) -> float:
    """Returns a bound of the probability that a round has no client."""
    return rounds * float((1 - _rate(train, clients)) ** clients)


def _rate(train: TrainConfig, clients: int) -> float:
    wanted = train.clients_per_round
    return 1.0 if wanted == "all" else min(wanted / clients, 1.0)
