"""Figures that are computed from the tables of finished runs."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.results.schemas import first_metric


def accuracy_curve(rounds: pa.Table, model: str, cohort: str = "all", phase: str = "received") -> dict[int, float]:
    """Mean test accuracy, or what the run's task is judged by, over clients by completed round.

    Args:
        rounds: summaries, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        model: name of the row (``global``, ``hpm``, ``lambda=0.5``).
        cohort: ``all`` or ``selected``.
        phase: ``received`` or ``trained``.
    """
    chosen = _rows(rounds, {"model": model, "cohort": cohort, "phase": phase, "split": "test", "selected_on": ""})
    return dict(sorted(zip(chosen["round"].to_pylist(), chosen[first_metric(rounds).name].to_pylist(), strict=True)))


def download_effect(clients: pa.Table, received: str = "global", trained: str = "local") -> dict[int, dict[int, float]]:
    """delta_t of FedPHP (Li et al., ECML PKDD 2021, eq. 4) by completed round and client.

    The test accuracy of the model that a client of round t downloads next, minus that of its personalized model
    right after its training in round t. Negative: the download destroys what the client had learned. Needs runs
    with ``evaluation.cohort_received=true``.

    Args:
        clients: rows, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        received: the downloaded model's row; for FedPHP ``hpm``, which is what its clients go on with.
        trained: the personalized model's row after training.
    """
    key = {"cohort": "selected", "split": "test"}
    after = _by_round_and_client(_rows(clients, {**key, "phase": "trained", "model": trained}))
    before = _by_round_and_client(_rows(clients, {**key, "phase": "received", "model": received}))
    result: dict[int, dict[int, float]] = {}
    for (round, client), accuracy in sorted(before.items()):
        if (round, client) in after:
            result.setdefault(round, {})[client] = accuracy - after[round, client]
    return result


def _rows(table: pa.Table, wanted: Mapping[str, str]) -> pa.Table:
    for column, value in wanted.items():
        table = table.filter(pc.equal(table[column], value))
    return table


def _by_round_and_client(rows: pa.Table) -> dict[tuple[int, int], float]:
    keys = zip(rows["round"].to_pylist(), rows["client"].to_pylist(), strict=True)
    return dict(zip(keys, rows[first_metric(rows).name].to_pylist(), strict=True))
