"""Weights of clients by the tokens that their language models learn."""

from __future__ import annotations

from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.tasks.base import Task

_WHY = "algorithm.aggregation=tokens weights clients by the tokens that are learned"


def check_tokens(task: Task) -> None:
    """Refuses a task in which no tokens are predicted.

    Raises:
        ConfigError: naming the task and the fix.
    """
    if getattr(task, "target", None) != "tokens":
        raise ConfigError(
            f"{_WHY}, and task={task.name} predicts none: set algorithm.aggregation=samples, or task=language_model"
        )


def tokens_of(client: Client) -> int:
    """Returns how many tokens a client learns: the positions of its training samples that have a target.

    Raises:
        ConfigError: it has none, and so no weight.
    """
    asked = client.task.asked(client.examples().y)
    found = 0 if asked is None else int(asked.sum())
    if not found:
        raise ConfigError(
            f"{_WHY}, and client {client.id} has none among its {client.num_samples} training samples: set "
            "algorithm.aggregation=samples, or leave such clients out of the data"
        )
    return found
