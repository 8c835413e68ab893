"""What an experiment learns: its task, with the model of the data set's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rayfl.config.beginning import initial_model
from rayfl.errors import ConfigError
from rayfl.metrics.changed_inputs import ASR, ROBUST
from rayfl.tasks.base import NetworkTask

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts


def task_of(parts: Parts, counts: np.ndarray | None) -> NetworkTask:
    """Returns the task, with one candidate for each architecture.

    Args:
        parts: the experiment.
        counts: training samples of each class, for a task that asks for them.

    Raises:
        ConfigError: the data do not say what the task learns from.
        ModelError: the model does not fit the inputs.
    """
    config, spec, seed = parts.config, parts.dataset.spec, parts.streams.integer("init.global")
    config.task.check(spec, config.dataset.name)
    made = config.model.networks(parts.model_spec)
    networks = [config.task.network_of(one, parts.model_spec, config.model.name) for one in made]
    for network in networks:
        network.settle(seed)
    model = initial_model(config.init, parts.storage)
    if model is not None and len(networks) > 1:
        raise ConfigError("init.from: clients of several architectures (model.candidates) have no model in common")
    if model is not None:
        networks[0].begin_from(seed, model, str(config.init.source))
    asked = {ASR: parts.backdoor, ROBUST: config.evaluation.adversarial}
    changes = tuple(metric for metric, change in asked.items() if change is not None)
    return config.task.task(networks, spec, changes, parts.evaluation_views, counts)
