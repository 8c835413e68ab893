"""The size of stacks."""

from __future__ import annotations

from rayfl.engine.tasks import Task


def clients_for_rows(rows_per_step: int | None, task: Task, batch_size: int) -> int | None:
    """Returns how many clients to stack so that a step's matrix products have enough rows; None if no limit is set.

    Args:
        rows_per_step: see ``EngineConfig``.
        task: what is learned.
        batch_size: samples of a mini-batch.
    """
    each = max((candidate.network.rows_per_sample for candidate in task.candidates), default=0)
    return None if rows_per_step is None or not each else max(rows_per_step // max(each * batch_size, 1), 1)
