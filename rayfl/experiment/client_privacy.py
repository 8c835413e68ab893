"""What differential privacy of clients promises of a run, where the server adds noise or each client does."""

from __future__ import annotations

import importlib.util
import logging
import statistics

from rayfl.config.beginning import branch_of
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.discrete_accounting import distributed_epsilon
from rayfl.engine.privacy import INSTALL, epsilon, local_epsilon, promise
from rayfl.engine.updates.cohorts import attendances
from rayfl.messages.compressors import SecureAggregation
from rayfl.randomness import RandomStreams

_log = logging.getLogger("rayfl")
_LARGE_DELTA = 0.05


def client_epsilon(config: ExperimentConfig, clients: int, summed: int, rounds: int) -> float:
    """Returns epsilon of a client; where each adds noise, of the one that is in the most rounds.

    Args:
        config: the experiment; messages have noise.
        clients: K.
        summed: numbers of a message at most, where epsilon depends on it.
        rounds: how many count.

    Raises:
        ImportError: opacus is not installed.
    """
    if not (config.privacy.local or config.privacy.distributed):
        return epsilon(config.privacy, config.train, clients, rounds)
    return _spent(config, clients, summed, max(_attendances(config, clients, rounds)))


def client_promise(config: ExperimentConfig, clients: int, summed: int, rounds: int) -> str:
    """Returns what is promised about clients after a number of rounds, in words; see client_epsilon."""
    privacy = config.privacy
    if not (privacy.local or privacy.distributed):
        return promise(privacy, config.train, clients, rounds)
    if importlib.util.find_spec("opacus") is None:
        return f"Privacy: {INSTALL} to see epsilon."
    times = _attendances(config, clients, rounds)
    most, middle = max(times), statistics.median_high(times)
    most_epsilon, middle_epsilon = (_spent(config, clients, summed, one) for one in (most, middle))
    kind, whom = "local ", "everybody who sees its messages, the server too"
    if privacy.distributed:
        kind, whom = "", "the server, which sees the sum of each round and knows whose it is"
    return (
        f"Privacy: {kind}epsilon = {most_epsilon:.2f} for the client that is in most of the {rounds} rounds ({most}), "
        f"{middle_epsilon:.2f} at the median ({middle}), at delta = {privacy.delta_of(clients):.2g}, against {whom}; "
        "scores are not private."
    )


def warn_of_delta(option: str, delta: float) -> None:
    """Warns of a delta that leaves little of what epsilon promises: with this probability it need not hold at all.

    Args:
        option: which one it is.
        delta: the largest of a client.
    """
    if delta > _LARGE_DELTA:
        _log.warning("%s: with a probability of %.2g a client may be promised nothing: set it lower", option, delta)


def _spent(config: ExperimentConfig, clients: int, summed: int, times: int) -> float:
    """Returns epsilon of a client that was in a number of rounds, with the noise that it adds."""
    if config.privacy.local:
        return local_epsilon(config.privacy, clients, times)
    assert isinstance(config.compression, SecureAggregation)
    wanted = config.train.clients_per_round
    cohort = clients if wanted == "all" else min(wanted, clients)
    return distributed_epsilon(config.privacy, config.compression, cohort, clients, summed, times)


def _attendances(config: ExperimentConfig, clients: int, rounds: int) -> tuple[int, ...]:
    """Returns in how many of the first rounds each client is sampled."""
    train, streams = config.train, RandomStreams(config.seed, branch=branch_of(config.init, config.privacy))
    sizes = (train.clients_per_round, train.min_clients_per_round)
    return attendances(streams, rounds, clients, *sizes, train.sampling)
