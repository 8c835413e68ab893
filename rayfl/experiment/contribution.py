"""Which runs can value their clients (the section ``contribution``)."""

from __future__ import annotations

import logging

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS
from rayfl.experiment.messages import check_changes, check_weights
from rayfl.messages.aggregators import Mean
from rayfl.params import Tree
from rayfl.tasks.base import Task
from rayfl.tasks.beside_training import TaskBesideTraining
from rayfl.valuation.section import Measured, NoContribution, Shapley

_log = logging.getLogger("rayfl")


def check_contribution(
    config: ExperimentConfig, initial: Tree, task: Task, context: RoundContext, sizes: np.ndarray
) -> None:
    """Refuses values that have no meaning in a run, or that could not be found; says what they cost.

    Args:
        config: the experiment.
        initial: the server's tree before round 0.
        task: what is learned.
        context: of round 0.
        sizes: samples by honest client that may train, and split.

    Raises:
        ConfigError: naming the option and the fix.
    """
    section = config.contribution
    if isinstance(section, NoContribution):
        return
    option = f"contribution={section.name}"
    _check_mean(config, context, option)
    if isinstance(section, Measured):
        _check_utility(config, section, option, initial, task, context)
        _say_costs(section, option, context, _samples(config, section, option, sizes))


def _check_mean(config: ExperimentConfig, context: RoundContext, option: str) -> None:
    """Refuses servers that do not see clients' models, or make something else than their mean."""
    method, rule = config.algorithm, config.aggregator
    check_changes(config, option)
    if method.own_rule:
        raise ConfigError(f"{option}: {method.name} has a rule of its own: {method.own_rule}; leave one out")
    if not method.takes_mean:
        raise ConfigError(
            f"{option}: a client is valued by its part in the weighted mean of models, and the server of {method.name} "
            "makes something else of what clients send, or more: choose a method such as fedavg or fedprox"
        )
    check_weights(config, option)
    if not isinstance(rule, Mean):
        raise ConfigError(
            f"{option}: a client is valued by its part in the weighted mean of models, which aggregator={rule.name} "
            "does not take: leave one out"
        )
    if context.secure_sum is not None:
        raise ConfigError(
            f"{option}: with compression=secure_aggregation the server sees sums alone, and values go by each client's "
            "message: leave one out"
        )
    if config.train.private_norm != "none":
        raise ConfigError(
            f"{option}: with train.private_norm={config.train.private_norm} the server has no whole model to value "
            "clients by: leave one out"
        )


def _check_utility(
    config: ExperimentConfig, section: Measured, option: str, initial: Tree, task: Task, context: RoundContext
) -> None:
    """Refuses what a model of the server cannot be worth."""
    method, measures = config.algorithm, task.measures
    if "global" not in method.global_predictors(method.served(initial, context)[0], task):
        raise ConfigError(f"{option}: {method.name} has no global model to be evaluated; choose contribution=cosine")
    if isinstance(task, TaskBesideTraining):
        raise ConfigError(
            f"{option}: task={config.task.name} scores samples beside a client's training samples, which the server "
            "does not have; choose contribution=cosine"
        )
    known = [one for one in measures.metrics if measures.measured_on(one.name, "validation")]
    names = ", ".join(one.name for one in known)
    chosen = next((one for one in known if section.metric in (None, one.name)), None)
    if chosen is None:
        raise ConfigError(f"contribution.metric: there is no {section.metric!r}; the task has {names}")
    if not chosen.ranked:
        raise ConfigError(f"contribution.metric: no {chosen.label} is better than another: choose one of {names}")


def _samples(config: ExperimentConfig, section: Measured, option: str, sizes: np.ndarray) -> int:
    """Returns on how many samples models are evaluated."""
    if section.samples == "public":
        if not config.holdout.public:
            raise ConfigError(
                "contribution.samples is public, but the server has no samples: set holdout.public, for instance to "
                "500, or leave the option out"
            )
        return config.holdout.public
    found = int(sizes[:, SPLITS.index("validation")].sum())
    if not found:
        raise ConfigError(
            f"{option}: it goes by validation samples, and no client has any: set holdout.validation, or "
            "contribution.samples=public and holdout.public"
        )
    return found


def _say_costs(section: Measured, option: str, context: RoundContext, samples: int) -> None:
    largest = context.num_clients if context.train.sampling == "poisson" else context.cohort_size
    if isinstance(section, Shapley) and largest <= section.exact_up_to:
        idle = [name for name in ("passes", "tolerance", "within") if name in section.model_fields_set]
        if idle:
            _log.warning(
                "contribution: rounds of up to %d clients are valued exactly (exact_up_to=%d), and nothing is drawn: "
                "no effect of %s",
                largest, section.exact_up_to, ", ".join(idle),
            )  # fmt: skip
    _log.info(
        "%s: up to %s models of a round of %d clients are evaluated, on %s samples (%s)",
        option, f"{section.most_evaluations(largest):,}", largest, f"{samples:,}", section.samples,
    )  # fmt: skip
