"""Which runs can choose the clients of their rounds by what is known of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.experiment.messages import check_changes, check_weights
from rayfl.messages.aggregators import Mean
from rayfl.selection.clustered import Clustered
from rayfl.selection.divfl import DivFL
from rayfl.selection.known import Known
from rayfl.selection.oort import Oort
from rayfl.selection.strategies import Custom, PowerOfChoice, Uniform
from rayfl.selection.tifl import TiFL
from rayfl.system.config import NoSystem
from rayfl.system.devices import Device
from rayfl.system.schedule import options_without_losses

_log = logging.getLogger("rayfl")


def check_selection(
    config: ExperimentConfig, task: Any, context: RoundContext, samples: np.ndarray, devices: Sequence[Device]
) -> None:
    """Refuses a choice of clients that the run cannot have; tries a user's own once.

    Args:
        config: the experiment.
        task: what is learned.
        context: of round 0.
        samples: n_k of the clients that may train.
        devices: simulated ones of the clients; none without ``system``.

    Raises:
        ConfigError: naming the option and the fix.
    """
    strategy, train = config.selection, config.train
    if isinstance(strategy, Uniform):
        return
    option, clients = f"selection={strategy.name}", context.num_clients
    if train.sampling != "fixed" or train.min_clients_per_round is not None:
        other = "sampling" if train.sampling != "fixed" else "min_clients_per_round"
        raise ConfigError(f"{option} chooses train.clients_per_round clients in each round: leave train.{other} out")
    if context.cohort_size >= clients:
        raise ConfigError(f"{option}: all {clients} clients take part in each round: lower train.clients_per_round")
    if config.privacy.on or config.privacy.of_examples:
        raise ConfigError(
            f"{option}: epsilon is for cohorts that do not depend on clients' samples; leave selection or privacy out"
        )
    _check_simulated(config, option, devices)
    if strategy.repeats or strategy.needs_updates:
        _check_means(config, context, option)
    if isinstance(strategy, PowerOfChoice) and not context.cohort_size <= strategy.candidates <= clients:
        raise ConfigError(
            f"selection.candidates is {strategy.candidates}: choose a number from train.clients_per_round "
            f"({context.cohort_size}) to the number of clients ({clients})"
        )
    if isinstance(strategy, TiFL) and clients // strategy.tiers < context.cohort_size:
        raise ConfigError(
            f"selection.tiers is {strategy.tiers}, so that a tier of the {clients} clients has as few as "
            f"{clients // strategy.tiers}, and all of a round's are of one tier: lower selection.tiers, or "
            f"train.clients_per_round ({context.cohort_size})"
        )
    if strategy.asked == "nobody":
        pass
    elif task.compares_samples or task.measures.compares:
        raise ConfigError(
            f"{option}: it needs losses of single samples; task={config.task.name} compares samples with each other"
        )
    elif context.secure_sum is not None:
        _log.warning("selection: clients tell their losses one by one, which secure sums of messages do not hide")
    if isinstance(strategy, Custom):
        known = replace(Known.before(samples), size=context.cohort_size)
        if strategy.asked == "candidates":  # it may count on losses: any will do
            known = replace(known, losses=np.ones(clients), squares=np.ones(clients))
        strategy.choose(known)


def _check_means(config: ExperimentConfig, context: RoundContext, option: str) -> None:
    """Refuses strategies that go by what clients send, or say how much it counts, where that is not to be had."""
    algorithm, strategy = config.algorithm, config.selection
    check_changes(config, option)
    if algorithm.own_rule:
        raise ConfigError(f"{option}: {algorithm.name} has a rule of its own: {algorithm.own_rule}; leave one out")
    if context.secure_sum is not None:
        why = (
            "the server sees sums alone, and this selection goes by each client's message"
            if context.keeps_changes
            else "a round may have one client, whose message would be the sum"
        )
        raise ConfigError(f"{option}: with compression=secure_aggregation {why}: leave one out")
    if context.keeps_changes:
        check_weights(config, option)
    if context.repeats is None:
        return
    fix = " (or set selection.weights=method)" if isinstance(strategy, DivFL) else ""
    if getattr(algorithm, "aggregation", "") != "uniform":
        weights = getattr(algorithm, "aggregation", "")
        set_to = f"is {weights}: set it to uniform" if weights else f"is no option of {algorithm.name}: choose fedavg"
        raise ConfigError(
            f"{option} says by itself how much a client counts in a mean, and algorithm.aggregation {set_to}{fix}"
        )
    if not isinstance(config.aggregator, Mean):
        raise ConfigError(
            f"{option} weighs clients in a mean, which aggregator={config.aggregator.name} does not take: leave one "
            f"out{fix}"
        )


def _check_simulated(config: ExperimentConfig, option: str, devices: Sequence[Device]) -> None:
    strategy, system = config.selection, config.system
    if isinstance(system, NoSystem):
        if isinstance(strategy, Oort) and strategy.preferred_s is not None:
            raise ConfigError("selection.preferred_s is about the time of simulated devices: give the section system")
        if isinstance(strategy, TiFL):
            raise ConfigError(f"{option}: tiers are of the time of simulated devices: give the section system")
        return
    if system.mode == "buffered":
        raise ConfigError(f"{option}: with system.mode=buffered clients begin one by one; set system.mode=synchronous")
    if isinstance(strategy, Clustered):
        needed = options_without_losses(system, devices)
        needed += ["system.over_sampling=1"] if system.over_sampling > 1 else []
        if needed:
            raise ConfigError(
                f"{option}: its mean is unbiased if all that are drawn take part, and simulated devices leave clients "
                f"out: set {', '.join(needed)}, or choose another selection"
            )
    if not isinstance(strategy, Uniform) and strategy.asked == "candidates":
        instead = "last" if isinstance(strategy, PowerOfChoice) else "cohort"
        raise ConfigError(
            f"{option} with selection.losses={strategy.losses}: finding losses before the choice would take time on "  # type: ignore[union-attr]
            f"simulated devices (system), which is not simulated: set selection.losses={instead}"
        )
