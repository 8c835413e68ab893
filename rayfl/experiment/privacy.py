"""What user-level differential privacy promises, and which runs cannot have it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.privacy import INSTALL, without_clients
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.experiment.client_privacy import client_promise, warn_of_delta
from rayfl.experiment.noised_sums import check_noised_sum, warn_of_coarse_levels
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.private_norm import private_names
from rayfl.system.config import NoSystem
from rayfl.tasks.base import NetworkTask

_log = logging.getLogger("rayfl")


def check_privacy(
    config: ExperimentConfig, task: NetworkTask, context: RoundContext, summed: Callable[[], int]
) -> None:
    """Refuses a run whose messages cannot be made private as asked, and logs what is promised.

    Args:
        config: the experiment.
        task: has the model.
        context: of round 0.
        summed: returns how many numbers a message has at most, where epsilon depends on it.

    Raises:
        ConfigError: naming the option and the fix.
    """
    privacy, train, algorithm = config.privacy, config.train, config.algorithm
    if train.sampling != "fixed" and not isinstance(config.system, NoSystem):
        raise ConfigError(
            f"train.sampling={train.sampling}: simulated devices (system) draw cohorts of their own; leave one out"
        )
    if not privacy.on:
        return
    if why := algorithm.no_privacy:
        raise ConfigError(f"privacy: {algorithm.name} cannot be made private by clipping and noise: {why}")
    if (weights := getattr(algorithm, "aggregation", "uniform")) != "uniform":
        raise ConfigError(
            f"privacy: with algorithm.aggregation={weights} a client's part of the mean depends on how many samples it "
            "has: set algorithm.aggregation=uniform"
        )
    if not isinstance(config.system, NoSystem):
        raise ConfigError("privacy: on simulated devices (system) who takes part depends on the clients' data")
    try:
        noise = privacy.sum_noise_of(context.cohort_size)
    except ValueError as error:
        raise ConfigError(
            f"privacy.count_noise: {error}; raise it, or train.clients_per_round, of which it is a twentieth by "
            "default, or lower privacy.noise_multiplier"
        ) from error
    if not privacy.noise_multiplier:
        _log.warning("privacy.noise_multiplier is 0: messages are clipped, and nothing is private")
        return
    if privacy.distributed:
        check_noised_sum(config, context)
    elif context.cohort_size < context.num_clients and not privacy.local:
        _check_sampling(privacy, train)
    if train.private_norm == "none" and private_names(task.network, "statistics"):
        raise ConfigError(
            "privacy: running variances of normalization layers, sent with the model, could become negative by noise: "
            "set train.private_norm=statistics, which keeps them at the clients, or model.norm=group"
        )
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError(f"privacy: epsilon is computed by opacus, which is not installed: {INSTALL}")
    _check_delta(privacy, train, context.num_clients)
    if config.init.source is not None and config.init.what == "model":
        _log.warning("privacy: what the model of init.from has learned from these clients is not counted in epsilon")
    if privacy.target_quantile is not None:
        _log.info(
            "privacy: the count of changes up to the clipping norm gets noise of %g, and the sum of %.4g times the "
            "norm, which together cost as much as %g times the norm alone",
            privacy.count_noise_of(context.cohort_size), noise, privacy.noise_multiplier,
        )  # fmt: skip
    warn_of_delta("privacy.delta", privacy.delta_of(context.num_clients))
    if privacy.distributed:
        warn_of_coarse_levels(config, context, summed())
    _log.info("%s", client_promise(config, context.num_clients, summed(), train.rounds))


def _check_sampling(privacy: PrivacyConfig, train: TrainConfig) -> None:
    if privacy.noise != "independent" and train.sampling != "cyclic":
        raise ConfigError(
            f"privacy.noise={privacy.noise}: epsilon depends on how often a client takes part and in which rounds, and "
            f"with train.sampling={train.sampling} it may be in any: set train.sampling=cyclic"
        )
    if train.sampling == "fixed":
        raise ConfigError(
            "privacy: what is promised is known for Poisson sampling, and for cohorts in a fixed order: set "
            "train.sampling=poisson or cyclic"
        )
    if train.sampling == "cyclic" and privacy.target_quantile is not None:
        raise ConfigError(
            "privacy.target_quantile: with train.sampling=cyclic a client that is not there stands for one that sends "
            "no change, of which the count of short changes says more than is noised: set train.sampling=poisson"
        )


def _check_delta(privacy: PrivacyConfig, train: TrainConfig, clients: int) -> None:
    empty, delta = without_clients(train, clients, train.rounds), privacy.delta_of(clients)
    if delta >= 1:  # of a single client
        raise ConfigError("privacy.delta: K^-1.1 of one client is 1, which promises nothing: set privacy.delta below 1")
    if privacy.local or privacy.distributed:  # a round without clients, or of one alone, is no round of these
        return
    if empty > delta / 2:
        raise ConfigError(
            f"privacy: with {train.clients_per_round} of {clients} clients on average, a client is alone in one of "
            f"{train.rounds} rounds with a probability of up to {min(empty, 1):.2g}, and delta is {delta:.2g}: raise "
            "train.clients_per_round"
        )
