"""Finds, before any actor starts, what an experiment cannot be run with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from rayfl.engine.stacks.compiled_steps import check_compilable
from rayfl.errors import ConfigError
from rayfl.experiment.checks import (
    check_learned,
    check_patches,
    check_private_norm,
    check_system,
    check_trainable,
    check_unlabelled,
    names_remarks,
    precision_remarks,
    statistics_remarks,
)
from rayfl.experiment.contribution import check_contribution
from rayfl.experiment.early_stopping import check_early_stopping
from rayfl.experiment.evaluated import (
    check_drawn,
    check_evaluated,
    check_newcomers,
    check_official_personalized,
    check_official_size,
    check_official_test,
    check_unseen,
)
from rayfl.experiment.example_privacy import check_example_privacy
from rayfl.experiment.labels import check_labels
from rayfl.experiment.messages import check_messages
from rayfl.experiment.optimizers import check_optimizer
from rayfl.experiment.own_methods import misspelt_hooks
from rayfl.experiment.privacy import check_privacy
from rayfl.experiment.secure_sums import check_secure_sums
from rayfl.experiment.selection import check_selection
from rayfl.experiment.shortfalls import check_shortfalls
from rayfl.experiment.stages import check_stages
from rayfl.naming.objects import names_an_object

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")


def check_parts(parts: Parts) -> np.ndarray:
    """Returns samples by client and split (K, 3).

    Args:
        parts: data set, task and context.

    Raises:
        RayflError: naming the field, file or model and the fix.
    """
    available = parts.num_clients
    for option, wanted in {
        "train.clients_per_round": parts.config.train.clients_per_round,
        "evaluation.clients": parts.config.evaluation.clients,
    }.items():
        if wanted != "all" and wanted > available:
            held = f": {parts.num_unseen} are held out (evaluation.unseen_clients)" if parts.num_unseen else ""
            raise ConfigError(f"{option} is {wanted}, but there are only {available} clients{held}")
    algorithm = parts.config.algorithm
    if len(parts.task.candidates) > 1 and not algorithm.mixes_architectures:
        raise ConfigError(
            f"model.candidates: all clients of {algorithm.name} share one architecture; give a single model"
        )
    algorithm.check_task(parts.task)
    check_unlabelled(parts.config, parts.task)
    if parts.augmentation is not None:
        check_patches(parts.config, parts.dataset.spec, parts.task.candidates)
    check_optimizer(parts.config.train)
    if parts.config.engine.compile:
        check_compilable(parts.task)
    algorithm.check(parts.task, parts.context)
    if names_an_object(algorithm.name):
        parts.initial_server()  # now, to find out what is wrong with a user's own
    if parts.config.train.private_norm != "none":
        check_private_norm(parts.config, parts.task, parts.context)
    check_drawn(parts.config)
    _ = parts.input_attack  # made now, to find out what is wrong with it
    if parts.config.evaluation.official_test:
        check_official_test(algorithm, parts.initial_server(), parts.task, parts.context)
    if parts.config.evaluation.official_personalized:
        check_official_personalized(algorithm)
    if parts.config.evaluation.scores_official:
        # opened now, to find out what is wrong with it
        check_official_size(parts.task, len(parts.official_test))
    if parts.num_unseen:
        check_unseen(parts.config)
    check_system(parts.config, parts.devices, available)
    check_privacy(parts.config, parts.task, parts.context, lambda: parts.summed)
    check_messages(parts.config, parts.context, parts.task)
    if parts.schedule is not None and parts.buffered:  # a first plan finds what is wrong with lists and traces
        parts.schedule.plan(0, parts.first_clock(parts.initial_server()))
    remarks = [*algorithm.idle_settings(), *algorithm.remarks(parts.context)]
    if names_an_object(algorithm.name):
        remarks += misspelt_hooks(type(algorithm))
    for remark in [*remarks, *statistics_remarks(algorithm, parts.task), *precision_remarks(parts.config)]:
        _log.warning("algorithm: %s", remark)
    if idle := parts.config.cluster.idle_settings():
        _log.warning("cluster: there are no actors with backend=inline, and so no effect of %s", ", ".join(idle))
    for remark in (*parts.dataset.remarks(), *names_remarks(parts.dataset.names)):
        _log.warning("dataset: %s", remark)
    check_labels(parts)
    check_stages(parts)
    sizes = parts.sizes
    check_trainable(sizes[:available, 0], parts.dataset.names)
    check_selection(parts.config, parts.task, parts.context, sizes[:available, 0], parts.devices)
    check_secure_sums(parts.config, parts.task, parts.context, parts.buffered, sizes[:available, 0].tolist())
    check_shortfalls(parts)
    check_example_privacy(parts.config, parts.task, parts.context, sizes[:available, 0].tolist())
    check_learned(parts.dataset, available, parts.task)
    scored = sizes[parts.honest(range(available))]
    check_evaluated(parts.config, scored, parts.dataset.own_splits)
    if parts.config.early_stopping.on:
        check_early_stopping(parts.config, parts.initial_server(), parts.task, parts.context, scored)
    if parts.context.keeps_messages:
        check_contribution(parts.config, parts.initial_server(), parts.task, parts.context, scored)
    try:
        algorithm.check_data(parts.task, sizes[:available], parts.config.holdout.public)
    except ConfigError as error:
        if not parts.dataset.own_splits or "holdout.public" not in str(error):
            raise
        name = parts.config.dataset.name
        raise ConfigError(f"{error}; but dataset={name} comes divided, and none of its samples can be public") from None
    if parts.num_unseen:
        check_newcomers(parts.config, sizes[available:])
    return sizes
