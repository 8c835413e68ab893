"""The results of a sweep: a row per experiment, and mean and standard deviation over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.metrics import Metric, first_best
from rayfl.results.personalized import of_clients
from rayfl.runs.curves import mean_over_seeds
from rayfl.sweeps.measures import Measure

SEED = "seed"
FINISHED = "finished"
_SPLITS = ("validation", "test")
_COUNTS = ("clients", *(f"{split}_clients" for split in _SPLITS))
_PLAIN = Measure()
_OF_DATA = (
    *("dataset", "partition", "long_tail", "holdout", "noise", "labelled", "stages", "attack"),
    *("evaluation.unseen_clients", "evaluation.adversarial"),
)
"""Beginnings of the paths of options that say on which samples of which clients models are scored."""
_OVER_SEEDS, _OVER_CLIENTS = "_std_over_seeds", "_std_over_clients"


def of_data(path: str) -> bool:
    """Returns whether an option says on which samples of which clients models are scored."""
    return path == "evaluation" or path.startswith(_OF_DATA)


def trials_table(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], measure: Measure = _PLAIN) -> pa.Table:
    """One row per experiment.

    Columns: ``trial`` (the folder), ``status`` (``finished``; ``stopped`` by the scheduler; ``failed``;
    ``unfinished``), ``reason``, ``rounds``, the varied values under their paths (as JSON where their types differ),
    ``clients`` (K), and of the compared model on both splits the number of clients that it was scored on
    (``test_clients``), each metric (``test_top1``) and its population standard deviation over them
    (``test_top1_std_over_clients``). Clients for which a metric is undefined are left out of its mean.
    """
    columns: dict[str, Any] = {
        "trial": pa.array([row["trial"] for row in rows], pa.string()),
        "status": pa.array([row["status"] for row in rows], pa.string()),
        "reason": pa.array([row["reason"] for row in rows], pa.string()),
        "rounds": pa.array([row["rounds"] for row in rows], pa.int32()),
    }
    for path in varied:
        columns[path] = _column([row["point"][path] for row in rows])
    for name in _COUNTS:
        columns[name] = pa.array([row.get(name) for row in rows], pa.int32())
    for name in (column for metric in _metric_columns(measure) for column in (metric, f"{metric}{_OVER_CLIENTS}")):
        columns[name] = pa.array([row.get(name) for row in rows], pa.float64())
    return pa.table(columns)


def groups_table(trials: pa.Table, varied: Sequence[str], measure: Measure) -> pa.Table:
    """One row per combination of the varied values but the seed, over its finished experiments.

    Columns: the values, ``experiments`` and ``finished``, ``clients`` and the fewest that an experiment was scored on
    (``test_clients``), each metric's mean (``test_top1``), its sample standard deviation over seeds
    (``test_top1_std_over_seeds``; null for one seed), that over clients (``test_top1_std_over_clients``, mean over
    seeds), and ``selected_on``: ``validation`` or ``test`` in the row that this split prefers among those whose
    experiments have all finished with a number, else empty. One row alone is not chosen. Where options of the data, of
    attacks or of unseen clients are varied, each combination of these has a choice of its own.
    """
    keys = [path for path in varied if path != SEED]
    members: dict[str, list[dict[str, Any]]] = {}
    for row in trials.to_pylist():
        members.setdefault(json.dumps([row[path] for path in keys]), []).append(row)
    rows = [_group(rows, keys, measure) for rows in members.values()]
    target = f"{measure.judge}_{measure.metric}"
    # The mean of the seeds that have a number says nothing of a group whose others have none.
    numbers = [sum(row[target] is not None for row in group) for group in members.values()]
    whole = [row for row, known in zip(rows, numbers, strict=True) if row["experiments"] == row["finished"] == known]
    # On other data or other clients' scores a number is no better or worse: each setting of these has its own best.
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        row["selected_on"] = ""
        settings.setdefault(json.dumps([row[path] for path in keys if of_data(path)]), []).append(row)
    for alike in settings.values():
        able = [row for row in alike if any(row is one for one in whole)]
        if len(alike) > 1 and able:
            best = first_best({place: float(row[target]) for place, row in enumerate(able)}, measure.mode)
            able[best]["selected_on"] = measure.judge
    schema = [(path, trials.schema.field(path).type) for path in keys]
    schema += [("experiments", pa.int32()), ("finished", pa.int32())]
    schema += [(name, pa.int32()) for name in _COUNTS]
    suffixes = ("", _OVER_SEEDS, _OVER_CLIENTS)
    schema += [(f"{name}{suffix}", pa.float64()) for name in _metric_columns(measure) for suffix in suffixes]
    return pa.Table.from_pylist(rows, schema=pa.schema([*schema, ("selected_on", pa.string())]))


def printed(groups: pa.Table, varied: Sequence[str], measure: Measure) -> Table:
    """The groups for a terminal, a line for each split."""
    rows = groups.to_pylist()
    chosen = [row["selected_on"] for row in rows if row["selected_on"]]
    notes = {
        "test": "* chosen on test data: not a fair estimate",
        "validation": "> best by validation data",
    }
    table = Table(
        title=f"{measure.model} model, {measure.metric}: means over clients and seeds",
        caption=notes[chosen[0]] if chosen else _unchosen(rows, measure),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    keys = [path for path in varied if path != SEED]
    table.add_column("", no_wrap=True)
    for heading in keys:
        table.add_column(heading, overflow="fold", min_width=5)
    table.add_column("data", no_wrap=True)
    # With three keys of any length this has room in 80 columns.
    for heading in (
        f"{measure.metric} {measure.shown.unit if measure.shown.unit == '%' else ''}".rstrip(),
        "+-\nseeds",
        "+-\nclients",
        "clients",
        "finished",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    marks = {"": " ", "validation": ">", "test": "*"}
    for row in rows:
        for split in _SPLITS:
            name = f"{split}_{measure.metric}"
            cells = [marks[row["selected_on"]], *(_text(row[path]) for path in keys), split]
            cells += [_number(row[f"{name}{suffix}"], measure.shown) for suffix in ("", _OVER_SEEDS, _OVER_CLIENTS)]
            scored = row[f"{split}_clients"]
            cells.append("-" if scored is None else of_clients(scored, row["clients"]))
            cells.append(f"{row['finished']} of {row['experiments']}")
            table.add_row(*cells, style="bold" if row["selected_on"] else None)
    return table


def _unchosen(rows: Sequence[Mapping[str, Any]], measure: Measure) -> str | None:
    """Returns why no row is the best, None where there was nothing to choose among."""
    done = [row for row in rows if row["finished"] == row["experiments"]]
    if len(rows) < 2 or (done and any(row[f"{measure.judge}_{measure.metric}"] is not None for row in done)):
        return None
    if not done:
        return "no best row: none has all its experiments finished"
    wanted = "set holdout.validation, or --select-on-test" if measure.judge == "validation" else "set holdout.test"
    return f"no best row: there are no numbers on {measure.judge} data ({wanted}; evaluation.splits)"


def _group(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], measure: Measure) -> dict[str, Any]:
    done = [row for row in rows if row["status"] == FINISHED]
    group: dict[str, Any] = {path: rows[0][path] for path in keys}
    group |= {"experiments": len(rows), "finished": len(done)}
    for name in _metric_columns(measure):
        values = [row[name] for row in done if row[name] is not None]
        group[name] = float(np.mean(values)) if values else None
        group[f"{name}{_OVER_SEEDS}"] = float(mean_over_seeds(values)[1]) if len(values) > 1 else None
        spreads = [row[f"{name}{_OVER_CLIENTS}"] for row in done if row[f"{name}{_OVER_CLIENTS}"] is not None]
        group[f"{name}{_OVER_CLIENTS}"] = float(np.mean(spreads)) if spreads else None
    for name in _COUNTS:
        group[name] = min((row[name] for row in done if row[name] is not None), default=None)
    return group


def _metric_columns(measure: Measure) -> list[str]:
    return [f"{split}_{metric}" for split in _SPLITS for metric in measure.columns]


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


def _number(value: float | None, metric: Metric) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if metric.unit == "%" else f"{value:.4f}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
