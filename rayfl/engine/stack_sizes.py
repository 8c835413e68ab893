"""How many clients make a stack."""

from __future__ import annotations

from rayfl.engine.tasks import Task


def clients_for_rows(rows_per_step: int | None, task: Task, batch_size: int) -> int | None:
    """Returns how many stacked clients fill a step's products with rows; None where nothing says so.

    Args:
        rows_per_step: see ``EngineConfig``.
        task: what is learned.
        batch_size: samples of a mini-batch.
    """
    each = max((candidate.network.rows_per_sample for candidate in task.candidates), default=0)
    return None if rows_per_step is None or not each else max(rows_per_step // max(each * batch_size, 1), 1)
