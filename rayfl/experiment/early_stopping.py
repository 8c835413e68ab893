"""Refuses, before any actor starts, an early end that cannot be decided, or that the method does not bear."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayfl.config.early_stopping import EarlyStoppingConfig
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS
from rayfl.metrics import Metric
from rayfl.naming.objects import names_an_object
from rayfl.params import Tree
from rayfl.tasks.base import Task

_log = logging.getLogger("rayfl")


def check_early_stopping(
    config: ExperimentConfig, initial: Tree, task: Task, context: RoundContext, sizes: np.ndarray
) -> None:
    """Refuses what ``early_stopping`` cannot do.

    Args:
        config: the experiment.
        initial: the server's tree before round 0.
        task: what is learned.
        context: of round 0.
        sizes: samples by client that may train and is scored, and split.

    Raises:
        ConfigError: naming the option.
    """
    rule, method = config.early_stopping, config.algorithm
    measures = task.measures
    _check_metric(rule, [one for one in measures.metrics if measures.measured_on(one.name, "validation")])
    if "validation" not in config.evaluation.splits or not sizes[:, SPLITS.index("validation")].any():
        raise ConfigError(
            "early_stopping: it goes by validation samples, and no client has any that are scored: set "
            "holdout.validation, and let evaluation.splits have validation"
        )
    if config.privacy.on or config.privacy.of_examples:
        raise ConfigError(
            "early_stopping: scores are not private, so neither would be the round in which the run ends; leave out "
            "one of early_stopping and privacy"
        )
    if rule.model == "global" and not method.global_predictors(method.served(initial, context)[0], task):
        raise ConfigError(f"early_stopping.model: {method.name} has no global model; leave the option out")
    if rule.model == "personalized" and method.personalized_later:
        raise ConfigError(
            f"early_stopping.model: {method.name} has no personalized models before the last evaluation; set "
            "early_stopping.model=global"
        )
    if (drawn := config.evaluation.clients) != "all" and drawn < context.num_clients:
        _log.warning(
            "early_stopping: evaluations before the last round are of %d drawn clients, other ones each time "
            "(evaluation.clients): what is compared differs by the clients, too, and the best is that of the luckiest",
            drawn,
        )
    _check_rounds(config)
    _check_course(config, method, task)


def _check_metric(rule: EarlyStoppingConfig, metrics: Sequence[Metric]) -> None:
    names = [metric.name for metric in metrics]
    if rule.metric is not None and rule.metric not in names:
        raise ConfigError(f"early_stopping.metric: there is no {rule.metric!r}; the task has {', '.join(names)}")
    watched = next(metric for metric in metrics if rule.metric in (None, metric.name))
    if not watched.ranked:
        raise ConfigError(f"early_stopping.metric: no {watched.label} is better than another: choose {names[0]}")
    if rule.target is not None and rule.target > 1 and (watched.unit, watched.better) == ("%", "higher"):
        raise ConfigError(
            f"early_stopping.target: {rule.target:g} is {watched.told(rule.target)}, which {watched.label} never "
            f"reaches; for {rule.target:g} % set {rule.target / 100:g}"
        )


def _check_rounds(config: ExperimentConfig) -> None:
    """Refuses a rule with which no run of so few rounds can end before its last."""
    rule, every, rounds = config.early_stopping, config.evaluation.every, config.train.rounds
    first = (rule.min_rounds // every + 1) * every  # the first evaluation that counts
    earliest = first if rule.target is not None else first + (rule.patience or 0) * every
    if earliest >= rounds:
        raise ConfigError(
            f"early_stopping: the earliest end would be after round {earliest}, and the run has {rounds} rounds "
            f"(evaluation.every={every}, early_stopping.patience={rule.patience}, early_stopping.min_rounds="
            f"{rule.min_rounds}): evaluate more often, or train longer"
        )


def _check_course(config: ExperimentConfig, method: Any, task: Task) -> None:
    """Refuses where the method would not come to what it does in its last rounds."""
    rounds, least = config.train.rounds, config.early_stopping.min_rounds
    course = [method.course_of(task, round, rounds) for round in range(rounds)]
    if all(part is None for part in course):
        if names_an_object(method.name):
            _log.warning(
                "early_stopping: %s does not say whether a round depends on train.rounds (Algorithm.course): if it "
                "reads context.rounds, a run that ends early has not come to what it does in its last rounds",
                method.name,
            )
        return
    if not all(isinstance(part, bool) for part in course):
        _log.warning(
            "early_stopping: what %s does in a round depends on train.rounds=%d; a run that ends before has not come "
            "to the end of that course",
            method.name, rounds,
        )  # fmt: skip
        return
    needed = max((round for round in range(1, rounds) if course[round] != course[round - 1]), default=0)
    if needed == rounds - 1:
        raise ConfigError(
            f"early_stopping: {method.name} does in the last of its train.rounds={rounds} rounds what it does in none "
            "before, and nobody knows of a round that it is the last until it has been evaluated; leave the option out"
        )
    if least < needed:
        raise ConfigError(
            f"early_stopping: {method.name} begins its last phase after {needed} of train.rounds={rounds} rounds, "
            f"and a run that ends before has nothing of it: set early_stopping.min_rounds={needed} or more"
        )
