"""What user-level differential privacy promises: epsilon, and how it is said."""

from __future__ import annotations

import importlib.util
import math
from functools import cache

import numpy as np

from rayfl.aggregation import banded_noise, tree_noise
from rayfl.engine.accountants import spent
from rayfl.engine.updates.cohorts import cyclic_attendances
from rayfl.engine.updates.settings import TrainConfig
from rayfl.messages.privacy import Noise, PrivacyConfig

INSTALL = "pip install 'rayfl[privacy]'"
"""What to do without opacus."""


def promise(privacy: PrivacyConfig, train: TrainConfig, clients: int, rounds: int) -> str:
    """Returns what is promised after a number of rounds, in words.

    Args:
        privacy: its section; the server adds noise.
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

    With Poisson sampling it is that of the Poisson-sampled normal mechanism (Mironov, Talwar, Zhang, 2019), by opacus.
    A round without any client adds no noise; the probability that there is one is taken from delta.

    Where it is known who takes part in which round, all rounds together are one normal mechanism: what the client that
    changes most changes of all sums that are noised, over their noise. A client that is not there is then one that
    sends no change.

    Args:
        privacy: its section; the server adds noise.
        train: says who is sampled.
        clients: K.
        rounds: T, at least 1.

    Raises:
        ValueError: nothing is promised for these options together.
    """
    if known_cohorts(privacy, train, clients):
        size = _size(train, clients)
        shared = privacy.bands_of(clients, size) if privacy.noise == "banded" else privacy.tree_rounds
        most = largest_sensitivity(privacy.noise, shared, clients, size, rounds)
        mechanism = (privacy.noise_multiplier / most, 1.0, 1)
    else:
        mechanism = (privacy.noise_multiplier, _rate(train, clients), rounds)
    delta = privacy.delta_of(clients) - without_clients(train, clients, rounds)
    return spent((mechanism,), delta, privacy.accountant)


def local_epsilon(privacy: PrivacyConfig, clients: int, times: int) -> float:
    """Returns epsilon of (epsilon, delta)-local differential privacy of a client, of whatever samples it has.

    Its messages, each with noise of its own, are normal mechanisms one after the other. Two changes of a length up to C
    differ by up to 2 C, so that the noise of one is z / 2 of what it hides.

    Args:
        privacy: its section; each client adds noise.
        clients: K.
        times: in how many rounds the client took part.
    """
    if not times:
        return 0.0
    return spent(((privacy.noise_multiplier / 2, 1.0, times),), privacy.delta_of(clients), privacy.accountant)


def known_cohorts(privacy: PrivacyConfig, train: TrainConfig, clients: int) -> bool:
    """Returns whether epsilon is that of clients of whom it is known in which rounds they take part.

    Args:
        privacy: its section.
        train: says who is sampled.
        clients: K.

    Raises:
        ValueError: the noise is that of a tree, and a client may be in any round; or cohorts are cyclic, and a count of
            clients is released, too.
    """
    tree, some = privacy.noise != "independent", _size(train, clients) < clients
    if some and tree and train.sampling != "cyclic":
        raise ValueError(f"privacy.noise={privacy.noise} has no epsilon with train.sampling={train.sampling}")
    if some and train.sampling == "cyclic" and privacy.target_quantile is not None:
        raise ValueError("privacy.target_quantile has no epsilon with train.sampling=cyclic")
    return tree or (some and train.sampling == "cyclic")


@cache
def largest_sensitivity(noise: Noise, shared: int | None, clients: int, size: int, rounds: int) -> float:
    """Returns the largest Euclidean norm of what one client changes of all sums that are noised, in units of C.

    It is for cyclic cohorts. Other clients' messages count as fixed: they depend on the client by what was released
    before alone, as the composition of normal mechanisms allows.

    Args:
        noise: ``privacy.noise``.
        shared: by how many rounds: ``privacy.tree_rounds``, or ``privacy.bands``.
        clients: K.
        size: m, the size of a cohort.
        rounds: T, at least 1.
    """
    found = 0.0
    for attended in cyclic_attendances(clients, size, rounds):
        if noise == "independent":
            found = max(found, float(np.count_nonzero(attended)))
        elif noise == "banded":
            assert shared is not None
            found = max(found, banded_noise.squared_sensitivity(attended, shared))
        else:
            found = max(found, tree_noise.squared_sensitivity(attended, shared, every_node=noise == "honaker"))
    return math.sqrt(found)


def without_clients(train: TrainConfig, clients: int, rounds: int) -> float:
    """Returns a bound of the probability that an empty round tells a client's presence.

    Such a round adds no noise. It tells something where, of all clients, one alone would be sampled.
    """
    if train.sampling == "cyclic":
        return 0.0
    rate = _rate(train, clients)
    return rounds * float(rate * (1 - rate) ** (clients - 1))


def _size(train: TrainConfig, clients: int) -> int:
    wanted = train.clients_per_round
    return clients if wanted == "all" else min(wanted, clients)


def _rate(train: TrainConfig, clients: int) -> float:
    return _size(train, clients) / clients
