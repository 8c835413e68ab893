"""Groups of people in training: what data must say of them, and training on samples that weigh differently."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.sample_rows import by_step
from rayfl.engine.client import Client
from rayfl.errors import ConfigError, MethodError
from rayfl.examples import Examples
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task


def check_people(task: Task, method: str, two_groups: bool) -> None:
    """Refuses data without groups of people, or with more classes than two.

    Args:
        task: what is learned.
        method: how the method is called.
        two_groups: whether more groups than two are refused too.

    Raises:
        ConfigError: saying what the data have, and the fix.
    """
    spec = getattr(task, "spec", None)
    if spec is None:  # a task of one's own may not say what its data are
        return
    groups, classes = len(spec.groups), spec.num_classes
    if not groups:
        raise ConfigError(
            f"{method} compares groups of people, and the data do not say of which one each sample is: name the "
            "column that does (dataset.group), or choose other data or another method (docs/group-fairness.md)"
        )
    if groups < 2 or classes != 2 or (two_groups and groups != 2):
        compared = "two groups by two classes" if two_groups else "groups by two classes"
        raise ConfigError(
            f"{method} compares {compared}, and the data have {groups} groups and {classes} classes: "
            "merge some in your data, or choose another method"
        )


def groups_of(samples: Examples, method: str) -> Tensor:
    """The position of each sample's group, -1 for none, int64 of shape (n,).

    Raises:
        MethodError: the samples have no groups.
    """
    if samples.group is None:  # a task of one's own that does not say what its data are
        raise MethodError(f"{method} compares groups of people, and samples have none (docs/group-fairness.md)")
    return samples.group


async def train_weighted(client: Client, model: Tree, weights: np.ndarray) -> Tree:
    """Trains a model on the mean of the samples' weights times their cross-entropy.

    Args:
        client: who trains.
        model: the received one.
        weights: of the client's training samples, float64 of shape (n,).
    """
    width = client.context.train.batch_size or client.num_samples
    return await client.train(model, _weighted_loss, draw=partial(by_step, weights[:, None], client.batches(), width))


def _weighted_loss(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    losses = F.cross_entropy(task.logits(model, batch), batch.y, reduction="none")
    return batch.mean(draw["rows"][: len(batch.y), 0] * losses)
