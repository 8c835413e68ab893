"""Mixup: a mini-batch is mixed with itself in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rayfl.engine.client import Client
from rayfl.engine.updates.batches import BatchPlan
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task


def check_mixed(method: str, option: str, task: Task) -> None:
    """Refuses a task whose inputs cannot be mixed.

    Args:
        method: what to call the method.
        option: the method's option that is 0 without mixup.
        task: the task.

    Raises:
        ConfigError: naming the fix.
    """
    spec = getattr(task, "spec", None)
    if spec is not None and spec.kind in ("tokens", "graph"):
        inputs = "rows of tokens" if spec.kind == "tokens" else "graphs"
        raise ConfigError(
            f"algorithm: {method} cannot mix the inputs of task={task.name}, which are {inputs}: set "
            f"algorithm.{option}=0"
        )


def mixing(client: Client, concentration: float) -> Callable[[np.random.Generator, int], Tree]:
    """What draws for :func:`mixed_loss`, for the mini-batches of ``Client.train``.

    Args:
        client: who trains.
        concentration: a of Beta(a, a).
    """
    width = client.context.train.batch_size or client.num_samples
    return partial(_drawn, concentration, client.batches(), width)


def _drawn(concentration: float, plan: BatchPlan, width: int, generator: np.random.Generator, steps: int) -> Tree:
    """By step ``share``, and ``order``, in which places after the end of a mini-batch stay where they are."""
    orders = np.tile(np.arange(width), (steps, 1))
    shares = np.zeros(steps)
    for step, size in enumerate(np.diff(plan.bounds)):
        shares[step] = generator.beta(concentration, concentration)
        orders[step, :size] = generator.permutation(size)
    return {"share": shares, "order": orders}


def mixed_loss(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """l CE(f(x_l), y) + (1 - l) CE(f(x_l), y') with x_l = l x + (1 - l) x', an objective.

    Args:
        model: f.
        batch: samples (x, y).
        task: what is learned.
        frozen: not read.
        draw: of :func:`mixing`: l, and the order in which the samples are (x', y').
    """
    order, share = draw["order"][: len(batch.y)].long(), draw["share"].to(batch.x)
    logits = task.logits(model, replace(batch, x=share * batch.x + (1 - share) * batch.x[order]))
    other = replace(batch, y=batch.y[order])
    found: Tensor = share * task.loss_of(logits, batch) + (1 - share) * task.loss_of(logits, other)
    return found
