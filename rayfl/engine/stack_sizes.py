"""The size of stacks."""

from __future__ import annotations

import torch

from rayfl.engine.engine_section import EngineConfig
from rayfl.tasks.base import Task

ENOUGH_ROWS = 16384
"""Rows that ``rows_per_step=auto`` asks for at least. Measured on an H100: a decoder of 1.1 billion parameters, with
checkpointing, has 96 % of the most samples a second."""
_MOST_ROWS = 65536
"""Measured on an H100: ViT-B/16 has 1.75 times as many samples a second as with 16,384 rows."""


def rows_per_step_of(config: EngineConfig, device: torch.device) -> int | None:
    """Returns the rows of a step that stacks are filled to; None if there is no limit.

    Args:
        config: options of the engine; a width that is a number is measured or chosen, so that memory has room for it.
        device: device of the actor.
    """
    if config.rows_per_step != "auto":
        return config.rows_per_step
    return _MOST_ROWS if device.type != "cpu" and isinstance(config.width, int) else ENOUGH_ROWS


def clients_for_rows(rows_per_step: int | None, task: Task, batch_size: int) -> int | None:
    """Returns how many clients to stack so that a step's matrix products have enough rows; None if no limit is set.

    Args:
        rows_per_step: see :func:`rows_per_step_of`.
        task: what is learned.
        batch_size: samples of a mini-batch.
    """
    networks = [candidate.network for candidate in task.candidates if candidate.network.rows_per_sample]
    samples = batch_size * getattr(task, "inputs_per_sample", 1)
    each = max((one.rows_per_sample * samples + one.rows_per_model for one in networks), default=0)
    return None if rows_per_step is None or not networks else max(rows_per_step // max(each, 1), 1)
