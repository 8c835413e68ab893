"""Refuses, before any actor starts, evaluations that cannot be made, and says who is left out of one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.data.partitions.assignment import FilePartition
from rayfl.data.sources.official import OFFICIAL_PIECE
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError, DataError
from rayfl.examples import SPLITS
from rayfl.params import Tree
from rayfl.tasks.base import Task

_log = logging.getLogger("rayfl")


def check_evaluated(config: ExperimentConfig, sizes: np.ndarray, own_splits: bool) -> None:
    """Refuses an evaluation of nobody, and says who is left out of one.

    Args:
        config: the experiment.
        sizes: samples by client that may train, and split.
        own_splits: whether the data come with their splits, so that ``holdout`` has no part in them.

    Raises:
        DataError: no client has a sample to be judged by.
    """
    # nobody is judged by training samples, which every client has
    splits: list[str] = [name for name in config.evaluation.splits if name != "train"]
    clients = len(sizes)
    scored = {name: int((sizes[:, SPLITS.index(name)] > 0).sum()) for name in splits}
    judged = "test" if "test" in splits else "validation"
    test = "null" if config.holdout.test is None else config.holdout.test
    holdout = f"holdout.test={test} holdout.validation={config.holdout.validation}"
    if own_splits:
        holdout = f"splits are those of dataset {config.dataset.name!r}"
    if not any(scored.values()) and config.evaluation.official_test:
        return  # the server's model is scored, and nothing else was asked for
    if not scored[judged]:
        others = [name for name in splits if scored[name]]
        instead = f", or set evaluation.splits={others}" if others else ""
        many = f"There are {clients} clients of at most {sizes.sum(1).max()} samples"
        why = (
            f"{many}, and their shares ({holdout}) are rounded down: raise holdout.{judged}, use fewer clients{instead}"
        )
        if own_splits:
            option = f" (dataset.{judged}, unless a file says it)" if hasattr(config.dataset, judged) else ""
            why = f"All {holdout}: hold more out there{option}, use fewer clients{instead}"
        raise DataError(f"evaluation.splits: no client has a {judged} sample, so that nobody would be evaluated. {why}")
    if scored[judged] < clients:
        _log.warning(
            "%d of %d clients have no %s samples and are in no evaluation of these (%s)",
            clients - scored[judged], clients, judged, holdout,
        )  # fmt: skip
    if not scored.get("validation", 1) and (config.holdout.validation or config.algorithm.sweep):
        why = f"; no {config.algorithm.sweep} can be chosen by them" if config.algorithm.sweep else ""
        _log.warning("no client has a validation sample (%s): there will be no such rows%s", holdout, why)


def check_drawn(config: ExperimentConfig) -> None:
    """Says that clients are drawn for no evaluation, where the last is the only one."""
    evaluation, rounds = config.evaluation, config.train.rounds
    if evaluation.clients != "all" and evaluation.every >= rounds:
        _log.warning(
            "evaluation.clients=%s: it is about evaluations before the last, and there is none "
            "(evaluation.every=%d, train.rounds=%d); the last is of all clients",
            evaluation.clients, evaluation.every, rounds,
        )  # fmt: skip


def check_unseen(config: ExperimentConfig) -> None:
    """Refuses clients that are held out where the method has nothing for newcomers, and epochs that nobody trains.

    Warns where those of an older run may be other clients.

    Raises:
        ConfigError: naming the option and the method.
    """
    method, evaluation = config.algorithm, config.evaluation
    if method.no_newcomers:
        raise ConfigError(
            f"evaluation.unseen_clients: {method.name} has nothing for a newcomer: {method.no_newcomers}; leave the "
            "option out, or choose another method"
        )
    if config.train.private_norm != "none" and "private_norm" not in method.train_settings:
        raise ConfigError(
            "evaluation.unseen_clients: a newcomer has no normalization layers of its own, which train.private_norm "
            "keeps with the clients: choose algorithm=fedbn, which fits them, or leave one of the two out"
        )
    if evaluation.unseen_epochs is not None and method.joins_for != "train.local_epochs":
        rule = f"trains as long as {method.joins_for} says" if method.joins_for else "trains nothing"
        tuned = ", or set algorithm.finetune_epochs" if "finetune_epochs" in type(method).model_fields else ""
        raise ConfigError(f"evaluation.unseen_epochs: a newcomer to {method.name} {rule}: leave it out{tuned}")
    if isinstance(config.partition, FilePartition) and not config.partition.unseen():
        _log.warning(
            "evaluation.unseen_clients: %s does not say that its run held clients out, so they are drawn; if it did, "
            "with an older rayfl, they were its last clients",
            config.partition.path,
        )


def check_newcomers(config: ExperimentConfig, sizes: np.ndarray) -> None:
    """Refuses newcomers of whom none can be scored, and says how many cannot learn or be scored.

    Args:
        config: the experiment.
        sizes: samples by client that is held out, and split.

    Raises:
        DataError: none of them has a sample to be judged by.
    """
    judged = "test" if "test" in config.evaluation.splits else "validation"
    for split in ("train", judged):
        without = int((sizes[:, SPLITS.index(split)] == 0).sum())
        if without == len(sizes) and split == judged:
            raise DataError(
                f"evaluation.unseen_clients: none of the {len(sizes)} clients held out has a {judged} sample: raise "
                f"evaluation.unseen_clients or holdout.{judged}"
            )
        if without:
            _log.warning("%d of %d clients held out have no %s samples", without, len(sizes), split)


def check_official_personalized(method: Any) -> None:
    """Refuses to score personalized models where there are none.

    Raises:
        ConfigError: naming the method.
    """
    tuned = getattr(method, "finetune_epochs", None) is not None
    if method.personalized == "global" and method.sweep is None and not tuned:
        raise ConfigError(
            f"evaluation.official_personalized: {method.name} has no personalized models; evaluation.official_test "
            "scores its global one"
        )


def check_official_size(task: Task, samples: int) -> None:
    """Refuses an official test part that is scored in pieces where its samples are compared with each other.

    Args:
        task: what is learned.
        samples: size of the part.

    Raises:
        ConfigError: naming the task.
    """
    if task.measures.compares and samples > OFFICIAL_PIECE:
        raise ConfigError(
            f"evaluation.official_test: its {samples} samples are scored in pieces of {OFFICIAL_PIECE}, but "
            f"task={task.name} compares all of them with each other: leave the option out, the clients' own test parts "
            "are scored as a whole"
        )


def check_official_test(method: Any, initial: Tree, task: Task, context: RoundContext) -> None:
    """Refuses to score the server's model where there is none.

    Args:
        method: the method.
        initial: the server's tree before round 0.
        task: what is learned.
        context: of round 0.

    Raises:
        ConfigError: naming the method.
    """
    server, _ = method.served(initial, context)
    if not method.global_predictors(server, task):
        raise ConfigError(
            f"evaluation.official_test: {method.name} has no model of the server's own; leave the option out"
        )
