"""Figures that are computed from the tables of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.results.schemas import first_metric
from rayfl.runs.measured import Cohort, Measured, Phase
from rayfl.runs.rows import summaries, where


def mean_over_seeds(values: Sequence[float] | np.ndarray) -> tuple[Any, Any]:
    """Returns the mean and the sample standard deviation over seeds, as all tables and figures have them.

    Args:
        values: an entry for each seed, shape (seeds, ...).

    Returns:
        Two numbers or arrays of shape (...); with one seed, and around an infinite mean, the standard deviation is nan.
    """
    found = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore"):
        spread = found.std(axis=0, ddof=1) if len(found) > 1 else np.full(found.shape[1:], np.nan)[()]
        return found.mean(axis=0), spread


def accuracy_curve(rounds: pa.Table, model: str, cohort: Cohort = "all", phase: Phase = "received") -> dict[int, float]:
    """Returns the mean test accuracy, or what the run's task is judged by, over clients by completed round.

    Args:
        rounds: summaries, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        model: name of the row (``global``, ``hpm``, ``lambda=0.5``).
        cohort: ``all`` or ``selected``.
        phase: ``received`` or ``trained``.
    """
    chosen = summaries(rounds, model, measured=Measured("test", cohort, phase))
    return dict(zip(chosen["round"].to_pylist(), chosen[first_metric(rounds).name].to_pylist(), strict=True))


def download_effect(clients: pa.Table, received: str = "global", trained: str = "local") -> dict[int, dict[int, float]]:
    """Returns delta_t of FedPHP (Li et al., ECML PKDD 2021, eq. 4) by completed round and client.

    The test accuracy of the model that a client of round t downloads next, minus that of its personalized model
    right after its training in round t. Negative: the download destroys what the client had learned. Needs runs
    with ``evaluation.cohort_received=true``.

    Args:
        clients: rows, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        received: the downloaded model's row; for FedPHP ``hpm``, which is what its clients go on with.
        trained: the personalized model's row after training.
    """
    key = {"cohort": "selected", "split": "test"}
    after = _by_round_and_client(where(clients, **key, phase="trained", model=trained))
    before = _by_round_and_client(where(clients, **key, phase="received", model=received))
    result: dict[int, dict[int, float]] = {}
    for (round, client), accuracy in sorted(before.items()):
        if (round, client) in after:
            result.setdefault(round, {})[client] = accuracy - after[round, client]
    return result


def _by_round_and_client(rows: pa.Table) -> dict[tuple[int, int], float]:
    keys = zip(rows["round"].to_pylist(), rows["client"].to_pylist(), strict=True)
    return dict(zip(keys, rows[first_metric(rows).name].to_pylist(), strict=True))
