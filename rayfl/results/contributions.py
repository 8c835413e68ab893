"""What clients have contributed to the model: rows by round and client, and the value of each client over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COSINE = "cosine"
"""The kind of values whose mean over rounds stands for a run; of others it is the sum."""

CONTRIBUTIONS_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("kind", pa.string()),
        ("metric", pa.string()),
        ("found", pa.string()),
        ("weight", pa.float64()),
        ("value", pa.float64()),
        ("before", pa.float64()),
        ("after", pa.float64()),
        ("evaluations", pa.int32()),
        ("permutations", pa.int32()),
        ("truncated", pa.int32()),
    ]
)
"""One row per client that took part in a round, of runs with the section ``contribution``.

``kind`` and ``metric`` are those of the section. ``weight`` is the client's share in the mean of the round, ``value``
what it has contributed; null where a utility was not a finite number. ``found`` says how values were found: ``exact``,
``drawn``, ``skipped`` (``between``: all are 0) or ``undefined``. The others are of the whole round, the same for all of
its clients: the utility of the model ``before`` and ``after`` it (the metric, or minus it where less is better), how
many models were evaluated, how many permutations were drawn, and at how many of their places no model was evaluated
because of ``within``. ``metric``, ``before`` and ``after`` are null for ``cosine``, which evaluates nothing.
"""


@dataclass(frozen=True)
class Contributions:
    """What clients have contributed over a run; arrays have an entry for each client that took part.

    Attributes:
        kind: of the values.
        metric: of their utility; empty where there is none.
        clients: ascending, (K,).
        values: float64, (K,): the sum of a client's values over rounds, of cosines the mean.
        rounds: how many rounds with a value it took part in, (K,).
        utility: the sum over rounds of what each has added to the utility; nan where there is none.
        evaluations: of models, in all rounds together.
        found: how many rounds were valued how.
        truncated: places of permutations at which nothing was evaluated, in all rounds together.
    """

    kind: str
    metric: str
    clients: np.ndarray
    values: np.ndarray
    rounds: np.ndarray
    utility: float
    evaluations: int
    found: Mapping[str, int]
    truncated: int


def rows_that_count(table: pa.Table) -> pa.Table:
    """Returns the rows of the last kind and metric: a fork may go on with others than the run that it is from.

    Args:
        table: of schema :data:`CONTRIBUTIONS_SCHEMA`, with rows.
    """
    kind, metric = table["kind"][-1].as_py(), table["metric"][-1].as_py()
    same = pc.field("metric").is_null() if metric is None else pc.field("metric") == metric
    return table.filter((pc.field("kind") == kind) & same)


def contributions_of(table: pa.Table) -> Contributions | None:
    """Returns what clients have contributed, by the rows that count; None without rows.

    Args:
        table: of schema :data:`CONTRIBUTIONS_SCHEMA`, or without columns.
    """
    if not table.num_rows:
        return None
    rows = rows_that_count(table)
    kind, metric = rows["kind"][-1].as_py(), rows["metric"][-1].as_py()
    clients = rows["client"].to_numpy()
    values = rows["value"].to_numpy(zero_copy_only=False).astype(float)
    everybody = np.unique(clients)
    there = [values[(clients == client) & ~np.isnan(values)] for client in everybody]
    totals = np.array([one.sum() for one in there])
    rounds = np.array([len(one) for one in there], np.int64)
    if kind == COSINE:
        totals = totals / np.maximum(rounds, 1)
    _, first = np.unique(rows["round"].to_numpy(), return_index=True)
    of_rounds = rows.take(pa.array(first))
    added = pc.sum(pc.subtract(of_rounds["after"], of_rounds["before"])).as_py()
    found = of_rounds["found"].to_pylist()
    return Contributions(
        kind,
        metric or "",
        everybody,
        np.where(rounds > 0, totals, np.nan),
        rounds,
        float("nan") if added is None else added,
        pc.sum(of_rounds["evaluations"]).as_py(),
        {how: found.count(how) for how in dict.fromkeys(found)},
        pc.sum(of_rounds["truncated"]).as_py(),
    )


def rows_of_round(
    round: int,
    kind: str,
    metric: str | None,
    shares: Mapping[int, float],
    values: Sequence[float],
    facts: Mapping[str, object],
) -> list[dict[str, object]]:
    """Returns the rows of a round.

    Args:
        round: completed rounds, this one included.
        kind: of the values.
        metric: of their utility; None without one.
        shares: in the mean of the round, by client, ascending.
        values: of these clients; nan where there is none.
        facts: by column, what is the same for all clients of the round; numbers may be nan.
    """
    same = {name: _defined(value) for name, value in facts.items()}
    return [
        {
            "round": round, "client": client, "kind": kind, "metric": metric, "weight": share,
            "value": _defined(value), **same,
        }
        for (client, share), value in zip(shares.items(), values, strict=True)
    ]  # fmt: skip


def _defined(value: object) -> object:
    return None if value != value else value
