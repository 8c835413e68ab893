"""Which runs can have clients that add integers of noise to a secure sum (``privacy.mechanism``)."""

from __future__ import annotations

import logging
import math

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.discrete_accounting import distributed_epsilon
from rayfl.engine.privacy import local_epsilon
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError

_log = logging.getLogger("rayfl")
_WIDEST = 32
"""Bits of a modulus: sums of wider numbers would not be exact in this simulation."""
_COARSE = 1.1
"""How much larger than that of normal noise epsilon may be before it is said."""


def check_noised_sum(config: ExperimentConfig, context: RoundContext) -> None:
    """Refuses runs in which a sum would not have the noise that epsilon counts on.

    Args:
        config: the experiment.
        context: of round 0.

    Raises:
        ConfigError: naming the option and the fix.
    """
    option, rule = f"privacy.mechanism={config.privacy.mechanism}", context.secure_sum
    if rule is None:
        raise ConfigError(
            f"{option}: a client's own noise hides its message in the sum of all alone: set "
            "compression=secure_aggregation, with which the server sees nothing else"
        )
    if rule.error_feedback:
        raise ConfigError(
            f"{option}: with compression.error_feedback a client would take its noise back in its next message: drop it"
        )
    if rule.modulus_bits > _WIDEST:
        raise ConfigError(f"{option}: sums are exact up to compression.modulus_bits={_WIDEST}: lower it")


def warn_of_coarse_levels(config: ExperimentConfig, context: RoundContext, summed: int) -> None:
    """Warns of levels so far apart that epsilon is larger than with normal noise of the same size.

    Args:
        config: the experiment, which :func:`check_noised_sum` has let pass.
        context: of round 0.
        summed: numbers of a message at most, where epsilon depends on it.
    """
    rule, privacy = context.secure_sum, config.privacy
    assert rule is not None
    rounds = math.ceil(config.train.rounds * context.mean_cohort / context.num_clients)
    found = distributed_epsilon(privacy, rule, context.cohort_size, context.num_clients, summed, rounds)
    # z of a sum counts once where that of a message counts half: two changes of it may differ by twice their length
    normal = privacy.model_copy(
        update={"mechanism": "gaussian", "noise_multiplier": 2 * privacy.noise_multiplier, "noise_at": "clients"}
    )
    if found > _COARSE * (plain := local_epsilon(normal, context.num_clients, rounds)):
        _log.warning(
            "privacy.mechanism=%s: in %d rounds epsilon is %.3g, and with normal noise of the same size %.3g: levels "
            "are too far apart for this norm, noise and number of entries: lower compression.clip, or raise "
            "compression.bits",
            privacy.mechanism, rounds, found, plain,
        )  # fmt: skip
