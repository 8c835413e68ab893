"""The results of a sweep: a row per experiment, and mean and standard deviation over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.sweeps.measures import Measure
from rayfl.table_schemas import METRICS

SEED = "seed"
FINISHED = "finished"
_SPLITS = ("validation", "test")
_PERCENT = ("top1", "top5")


def trials_table(rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> pa.Table:
    """One row per experiment.

    Columns: ``trial`` (the folder), ``status`` (``finished``; ``stopped`` by the scheduler; ``failed``;
    ``unfinished``), ``reason``, ``rounds``, the varied values under their paths (as JSON where their types differ),
    and each metric of the compared model on both splits.
    """
    columns: dict[str, Any] = {
        "trial": pa.array([row["trial"] for row in rows], pa.string()),
        "status": pa.array([row["status"] for row in rows], pa.string()),
        "reason": pa.array([row["reason"] for row in rows], pa.string()),
        "rounds": pa.array([row["rounds"] for row in rows], pa.int32()),
    }
    for path in varied:
        columns[path] = _column([row["point"][path] for row in rows])
    for name in _metric_columns():
        columns[name] = pa.array([row.get(name) for row in rows], pa.float64())
    return pa.table(columns)


def groups_table(trials: pa.Table, varied: Sequence[str], measure: Measure) -> pa.Table:
    """One row per combination of the varied values but the seed, over its finished experiments.

    Columns: the values, ``experiments`` and ``finished``, each metric's mean and sample standard deviation
    (``test_top1``, ``test_top1_std``; null for one seed), and ``selected_on``: ``validation`` or ``test`` in the row
    that this split prefers among those whose experiments have all finished, else empty. One row alone is not chosen.
    """
    keys = [path for path in varied if path != SEED]
    members: dict[str, list[dict[str, Any]]] = {}
    for row in trials.to_pylist():
        members.setdefault(json.dumps([row[path] for path in keys]), []).append(row)
    rows = [_group(rows, keys) for rows in members.values()]
    target = f"{measure.judge}_{measure.metric}"
    whole = [row for row in rows if row["experiments"] == row["finished"] and row[target] is not None]
    best = None
    if len(rows) > 1 and whole:
        best = (max if measure.mode == "max" else min)(whole, key=lambda row: float(row[target]))
    for row in rows:
        row["selected_on"] = measure.judge if row is best else ""
    schema = [(path, trials.schema.field(path).type) for path in keys]
    schema += [("experiments", pa.int32()), ("finished", pa.int32())]
    schema += [(f"{name}{suffix}", pa.float64()) for name in _metric_columns() for suffix in ("", "_std")]
    return pa.Table.from_pylist(rows, schema=pa.schema([*schema, ("selected_on", pa.string())]))


def printed(groups: pa.Table, varied: Sequence[str], measure: Measure) -> Table:
    """The groups for a terminal."""
    rows = groups.to_pylist()
    chosen = [row["selected_on"] for row in rows if row["selected_on"]]
    notes = {
        "test": "* chosen on test data: not a fair estimate",
        "validation": "> best by validation data",
    }
    table = Table(
        title=f"{measure.model} model, {measure.metric}: mean +- std over seeds",
        caption=notes[chosen[0]] if chosen else None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    keys = [path for path in varied if path != SEED]
    for heading in ("", *keys):
        table.add_column(heading)
    for heading in (*_SPLITS, "finished"):
        table.add_column(heading, justify="right", no_wrap=True)
    marks = {"": " ", "validation": ">", "test": "*"}
    for row in rows:
        cells = [marks[row["selected_on"]], *(_text(row[path]) for path in keys)]
        cells += [_spread(row, f"{split}_{measure.metric}") for split in _SPLITS]
        cells.append(f"{row['finished']} of {row['experiments']}")
        table.add_row(*cells, style="bold" if row["selected_on"] else None)
    return table


def _group(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    done = [row for row in rows if row["status"] == FINISHED]
    group: dict[str, Any] = {path: rows[0][path] for path in keys}
    group |= {"experiments": len(rows), "finished": len(done)}
    for name in _metric_columns():
        values = [row[name] for row in done if row[name] is not None]
        group[name] = float(np.mean(values)) if values else None
        group[f"{name}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return group


def _metric_columns() -> list[str]:
    return [f"{split}_{metric}" for split in _SPLITS for metric in METRICS]


def _column(values: Sequence[Any]) -> pa.Array:
    """Scalars of one type as they are, everything else as JSON."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return pa.array(values, pa.string())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int}:
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array([float(value) for value in values], pa.float64())
    return pa.array([json.dumps(value) for value in values], pa.string())


def _spread(row: Mapping[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    percent = name.partition("_")[2] in _PERCENT
    scale, digits, unit = (100, 2, " %") if percent else (1, 4, "")
    std = row[f"{name}_std"]
    spread = "" if std is None else f" +- {scale * std:.{digits}f}"
    return f"{scale * row[name]:.{digits}f}{spread}{unit}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
