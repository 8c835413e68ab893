"""What a page says of a single client when its point is chosen: its curves and its samples by label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.examples import SPLITS
from rayfl.metrics import Metric
from rayfl.report.charts import in_page, rounded
from rayfl.report.drawing import Drawing
from rayfl.report.rows import RowKey
from rayfl.results.schemas import first_metric
from rayfl.runs.loading import Run
from rayfl.runs.rows import rows_of_clients, summaries

_MOST_VALUES = 60_000
"""A page has about this number of values of clients' curves; of longer ones it has every n-th evaluation."""
_MOST_LABELS = 24
"""Further labels of a client are added up."""


def client_details(run: Run, keys: Sequence[RowKey], clients: Sequence[int], partition: Drawing | None) -> str:
    """Returns curves and samples by label of clients as JSON that can stand in a page.

    Args:
        run: the run.
        keys: the rows whose curves are shown.
        clients: whose.
        partition: the figure of the partition, whose data say which labels the clients have; None: nobody knows.
    """
    first = first_metric(run.rounds)
    curves = {key.label: _curves(run, key, first) for key in keys}
    rounds = sorted({round for by_round in curves.values() for round in by_round})
    rounds = _thinned(rounds, max(1, _MOST_VALUES // max(1, len(clients) * len(keys))))
    kind, labels = _labels(partition)
    return in_page(
        {
            "axes": [{"label": "rounds completed", "whole": True}],
            "label": first.axis,
            "digits": first.digits,
            "rounds": rounds,
            "lines": list(curves),
            "kind": kind,
            "clients": {
                str(client): {
                    "curves": [
                        rounded(np.array([by_round.get(round, {}).get(client, np.nan) for round in rounds]))
                        for by_round in curves.values()
                    ],
                    "labels": labels.get(client, []),
                }
                for client in clients
            },
        }
    )


def _curves(run: Run, key: RowKey, metric: Metric) -> dict[int, dict[int, float]]:
    """Returns the shown values of all clients by round; of a choice among a sweep those of what was chosen then."""
    found: dict[int, dict[int, float]] = {}
    for row in summaries(run.rounds, *key, run.measured).to_pylist():
        model = row["choice"] if key.selected_on else key.model
        if not model:
            continue
        rows = rows_of_clients(run.clients, model, row["round"], run.measured)
        values = metric.scale * np.asarray(rows[metric.name].to_numpy(zero_copy_only=False), dtype=float)
        found[row["round"]] = dict(zip(rows["client"].to_pylist(), values.tolist(), strict=True))
    return found


def _thinned(rounds: Sequence[int], most: int) -> list[int]:
    """Returns at most about this number of rounds at equal distances, the last among them."""
    step = -(-len(rounds) // most)
    return list(rounds[::-1][::step][::-1])


def _labels(partition: Drawing | None) -> tuple[str, dict[int, list[list[Any]]]]:
    """Returns what samples are counted by, and by client the pairs of a label and a count, the largest first."""
    if partition is None:
        return "", {}
    if "class" not in partition.data.column_names:
        rows = partition.data.to_pylist()
        return "split", {row["client"]: [[split, int(row[split])] for split in SPLITS] for row in rows}
    found: dict[int, list[list[Any]]] = {}
    for client, label, samples in _sorted(partition.data):
        found.setdefault(client, []).append([str(label), samples])
    for pairs in found.values():
        rest = sum(count for _, count in pairs[_MOST_LABELS:])
        pairs[_MOST_LABELS:] = [["others", rest]] if rest else []
    return "label", found


def _sorted(data: pa.Table) -> list[tuple[int, int, int]]:
    ordered = data.sort_by([("client", "ascending"), ("samples", "descending"), ("class", "ascending")])
    columns = (ordered[name].to_pylist() for name in ("client", "class", "samples"))
    return list(zip(*columns, strict=True))
