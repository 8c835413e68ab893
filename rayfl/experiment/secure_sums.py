"""Which runs can have secure aggregation (``compression=secure_aggregation``)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from rayfl.aggregation.secure_sum import most_weight, shares_needed
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.messages.aggregators import Mean
from rayfl.messages.compressors import SecureAggregation
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.private_norm import private_names
from rayfl.tasks.base import NetworkTask

_NAME = "compression=secure_aggregation"
_ALONE = ("sign_flip", "gaussian", "scaled")
"""Attacks for which a client need not know what honest ones send."""
_DEVIATIONS = 4
"""Standard deviations of clients' noise for which a sum has room, as in the papers' experiments."""


def check_secure_sums(
    config: ExperimentConfig, task: NetworkTask, context: RoundContext, buffered: bool, samples: Sequence[int]
) -> None:
    """Refuses runs whose server would need more than sums, or whose sums would not fit into the modulus.

    Args:
        config: the experiment.
        task: what is learned.
        context: of round 0.
        buffered: whether rounds have no barrier.
        samples: training samples of the clients that may train.

    Raises:
        ConfigError: naming the option and the fix.
    """
    if context.secure_sum is None:
        return
    attack, aggregator = config.attack, config.aggregator
    if not isinstance(aggregator, Mean):
        raise ConfigError(
            f"{_NAME}: the server sees sums alone, and aggregator={aggregator.name} needs every message: leave one out"
        )
    if config.algorithm.own_rule:
        raise ConfigError(
            f"{_NAME}: the server sees sums alone, and {config.algorithm.name} needs every message: leave one out"
        )
    if attack.on_messages and attack.message not in _ALONE:
        raise ConfigError(
            f"{_NAME}: attack.message={attack.message} is made of what honest clients send, which nobody sees: "
            f"choose {', '.join(_ALONE)}"
        )
    if buffered:
        raise ConfigError(f"{_NAME}: masks are those of clients that begin together: set system.mode=synchronous")
    kept = private_names(task.network, config.train.private_norm)
    if sent := [name for name in task.network.buffer_names if name not in kept]:
        raise ConfigError(
            f"{_NAME}: the running statistics of the model ({sent[0]}) would be sent beside the sum, one by one: set "
            "train.private_norm=statistics, which keeps them at the clients, or model.norm=group"
        )
    _check_cohort(context)
    _check_modulus(config, context, samples)


def _check_cohort(context: RoundContext) -> None:
    rule, smallest = context.secure_sum, context.smallest_cohort
    assert rule is not None
    least = 2 if rule.neighbours is None else rule.neighbours + 1
    if smallest >= max(least, shares_needed(rule.holders(smallest), rule.threshold)):
        return
    at_least = "" if smallest == context.cohort_size else " in the smallest round"
    fix = "" if rule.neighbours is None else ", or lower compression.neighbours"
    sampling = " (with train.sampling=poisson there may be none)" if context.train.sampling == "poisson" else ""
    raise ConfigError(
        f"{_NAME} needs {least} clients in a round, and there are {smallest}{at_least}{sampling}: raise "
        f"train.clients_per_round{fix}"
    )


def _check_modulus(config: ExperimentConfig, context: RoundContext, samples: Sequence[int]) -> None:
    rule, weights = context.secure_sum, getattr(config.algorithm, "aggregation", "uniform")
    assert rule is not None
    if weights not in ("samples", "uniform", "population", "tokens"):
        raise ConfigError(
            f"{_NAME}: not with algorithm.aggregation={weights}, whose weights are no integers: choose samples or "
            "uniform"
        )
    if weights == "tokens":  # known to the clients alone: the sum of each round is checked
        return
    largest = context.cohort_size
    if weights != "uniform":
        largest = sum(heapq.nlargest(context.cohort_size, map(int, samples)))
    beside = _weight_of_noise(config.privacy, rule)
    largest += beside
    if largest <= rule.most_weight:
        return
    fewer = [bits for bits in range(2, rule.bits) if most_weight(bits, rule.modulus_bits) >= largest]
    wider = [wide for wide in range(rule.modulus_bits, 65) if most_weight(rule.bits, wide) >= largest]
    fixes = [f"compression.bits={fewer[-1]}"] if fewer else []
    fixes += [f"compression.modulus_bits={wider[0]}"] if wider else []
    if weights != "uniform" and context.cohort_size <= rule.most_weight:
        fixes.append("algorithm.aggregation=uniform")
    noise = f" ({beside} of them for noise of four deviations)" if beside else ""
    raise ConfigError(
        f"{_NAME}: the weights of a round's clients are up to {largest} in all{noise}, and sums with bits={rule.bits} "
        f"modulo 2^{rule.modulus_bits} wrap from {rule.most_weight + 1} on: set {' or '.join(fixes)}"
    )


def _weight_of_noise(privacy: PrivacyConfig, rule: SecureAggregation) -> int:
    """Returns how many clients could send what the noise of a sum is rarely larger than; 0 without noise of clients."""
    if not privacy.distributed or privacy.clip_norm is None:
        return 0
    return math.ceil(_DEVIATIONS * privacy.noise_multiplier * privacy.clip_norm / rule.clip)
