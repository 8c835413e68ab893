"""Which runs can have compressed messages, malicious clients and robust aggregation."""

from __future__ import annotations

import logging

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.messages.aggregators import Mean
from rayfl.messages.compressors import Compressor
from rayfl.messages.mixing_rules import Flame
from rayfl.models.private_norm import private_names
from rayfl.tasks.base import NetworkTask

_log = logging.getLogger("rayfl")


def check_messages(config: ExperimentConfig, context: RoundContext, task: NetworkTask) -> None:
    """Refuses what a run's messages cannot have, and says who is malicious.

    Args:
        config: the experiment.
        context: of round 0.
        task: what is learned.

    Raises:
        ConfigError: naming the option and the fix.
    """
    attack, size = config.attack, config.evaluation.clients
    honest = context.num_clients - len(context.attackers)
    if size != "all" and size > honest:
        raise ConfigError(f"evaluation.clients is {size}, but {honest} clients are honest, and no others are scored")
    if isinstance(config.compression, Compressor):
        check_changes(config, f"compression={config.compression.name}")
    if attack.on_messages or not isinstance(config.aggregator, Mean):
        _check_aggregator(config, context)
    if isinstance(config.aggregator, Flame) and config.aggregator.noise:
        _check_statistics(config, task)
    if attack.backdoor is not None and "test" not in config.evaluation.splits:
        raise ConfigError("attack.backdoor: its success is measured on test samples: add test to evaluation.splits")
    if attack.on:
        known = ", ".join(map(str, sorted(context.attackers)))
        _log.warning(
            "attack: %d of %d clients are malicious, and in no score: %s%s",
            len(context.attackers), context.num_clients, known[:_MOST], " ..." if len(known) > _MOST else "",
        )  # fmt: skip
    elif not isinstance(config.aggregator, Mean):
        _log.info("aggregator: %s, and no client is malicious (attack)", config.aggregator.name)


_MOST = 200
"""Characters of a list of clients in a message."""


def check_changes(config: ExperimentConfig, option: str) -> None:
    """Refuses an option that is about changes of one model, where clients send something else.

    Args:
        config: the experiment.
        option: as a user would write it.

    Raises:
        ConfigError: naming the option and the method.
    """
    algorithm = config.algorithm
    if (why := algorithm.no_privacy) and not algorithm.own_rule:
        raise ConfigError(
            f"{option}: it is for changes of one model, of which a mean is taken; {algorithm.name}: {why}"
        )
    if config.privacy.distributed and config.compression.name == "secure_aggregation":
        if option == f"compression={config.compression.name}":
            return
        raise ConfigError(
            f"{option}: with privacy.mechanism={config.privacy.mechanism} epsilon counts on the noise of every "
            "client of a sum, and a message alone has too little of it; leave one out, or set privacy.noise_at=clients"
        )
    if config.privacy.on and not config.privacy.local:
        raise ConfigError(
            f"{option}: together with noise that the server adds it is not defined; leave one out, or set "
            "privacy.noise_at=clients"
        )


def check_weights(config: ExperimentConfig, option: str) -> str:
    """Refuses an option that needs the summands of a mean one by one, where these are not clients' messages alone.

    Args:
        config: the experiment.
        option: as a user would write it.

    Returns:
        How the method weighs clients.

    Raises:
        ConfigError: naming both options.
    """
    weights: str = getattr(config.algorithm, "aggregation", "uniform")
    if weights not in ("samples", "uniform", "tokens"):
        own = " (the server's own model is part of that mean)" if weights == "population" else ""
        raise ConfigError(f"{option}: not with algorithm.aggregation={weights}{own}: choose samples or uniform")
    return weights


def _check_aggregator(config: ExperimentConfig, context: RoundContext) -> None:
    algorithm, rule = config.algorithm, config.aggregator
    option = "attack.message" if isinstance(rule, Mean) else f"aggregator={rule.name}"
    check_changes(config, option)
    if algorithm.own_rule and not isinstance(rule, Mean):
        raise ConfigError(f"{option}: {algorithm.name} has a rule of its own: {algorithm.own_rule}; leave one out")
    weights = check_weights(config, option)
    smallest = context.smallest_cohort
    if max(smallest, 1) < rule.least:  # without any client there is no message, and nothing changes
        at_least = "" if smallest == context.cohort_size else " in the smallest round"
        fixes = ["raise train.clients_per_round"]
        if context.train.sampling == "poisson":
            at_least += " (with train.sampling=poisson there may be none)"
            fixes = ["set train.sampling=fixed or cyclic"]
        if getattr(rule, "malicious", 0):
            fixes.append("lower aggregator.malicious")
        if getattr(getattr(rule, "then", None), "malicious", 0):
            fixes.append("lower aggregator.then.malicious")
        raise ConfigError(
            f"{option} needs {rule.least} clients in a round, and there are {smallest}{at_least}: {', or '.join(fixes)}"
        )
    if not (rule.weighs and getattr(rule, "then", rule).weighs) and weights != "uniform":
        _log.warning("%s: every client counts alike; algorithm.aggregation=%s has no effect on models", option, weights)


def _check_statistics(config: ExperimentConfig, task: NetworkTask) -> None:
    kept = private_names(task.network, config.train.private_norm)
    if sent := [name for name in task.network.buffer_names if name not in kept]:
        raise ConfigError(
            f"aggregator=flame: its noise would also be in the running statistics of the model ({sent[0]}), where a "
            "variance may become negative: set train.private_norm=statistics, which keeps them at the clients, "
            "model.norm=group, or aggregator.noise=0"
        )
