"""The columns of a run's tables, and what their rows are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pyarrow as pa

from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.calibration import CALIBRATION_SCHEMA
from rayfl.results.contributions import CONTRIBUTIONS_SCHEMA

PARTITION_KEY = b"rayfl.partition"
"""Where all tables' metadata have the hash of who owns which sample."""

CONTENT_KEY = b"rayfl.content"
"""Where they have the checksum of the source's samples; those of older runs, and of made-up data, have none."""

PERSONALIZED_KEY, SWEEP_KEY = b"rayfl.personalized", b"rayfl.sweep"
"""Where they have the row that is the method's personalized model, and the prefix of the rows among which one is chosen
(only of methods that have such rows). Tables of older runs have neither; see ``rayfl.results.personalized``."""

CLIENTS_KEY = b"rayfl.clients"
"""Where they have K, the number of clients that may take part in training; tables of older runs have not."""

UNSEEN_KEY = b"rayfl.unseen"
"""Where they have how many clients are held out from training; only those of runs with such clients."""

METHOD_KEY = b"rayfl.method"
"""Where tables have the name that a method of a user's own gives itself; those of other methods have none."""

METRICS_KEY = b"rayfl.metrics"
"""Where tables have what the task is judged by, as JSON; those of classification without further metrics have not."""

ADAPTERS_KEY = b"rayfl.adapters"
"""In the metadata of tables of runs that train adapters, whose ``rounds`` have the column ``product_error``."""

ADAPTIVE_KEY = b"rayfl.adaptive"
"""In the metadata of tables of runs whose clipping norm moves: ``rounds`` has the column ``clip_norm``."""

METRICS = ("loss", "top1", "top5", "ece", "mce")
"""The metrics that all tables have columns for; null where the task has no such metric."""

_KEYS = [
    ("round", pa.int32()),
    ("split", pa.string()),
    ("cohort", pa.string()),
    ("phase", pa.string()),
    ("model", pa.string()),
]

CLIENTS_SCHEMA = pa.schema(
    [
        ("client", pa.int32()),
        ("name", pa.string()),
        *_KEYS,
        ("n", pa.int64()),
        *((m, pa.float64()) for m in METRICS),
        ("bytes_down", pa.int64()),
        ("bytes_up", pa.int64()),
    ]
)
"""One row per round, client, split, cohort, phase and model.

``round`` counts completed rounds. ``cohort`` is ``all`` (every client that may train is evaluated, or before the last
round those that ``evaluation.clients`` draws of them), ``selected`` (the clients sampled in this round) or ``unseen``
(the clients that are held out from training, which have the last numbers).
``phase`` is ``received`` (models as they are before local training) or ``trained`` (right
after the client's local training). The metrics are those of the client's whole split; a task that has others than the
five adds their columns (:func:`schema_of`), null where one is undefined for the client. Bytes are those of the
round's messages to and from this client, null where it was not sampled.
"""

ROUNDS_SCHEMA = pa.schema(
    [
        *_KEYS,
        ("selected_on", pa.string()),
        ("choice", pa.string()),
        ("clients", pa.int32()),
        ("n", pa.int64()),
        *((f"{m}{suffix}", pa.float64()) for m in METRICS for suffix in ("", "_std")),
        ("top1_worst5", pa.float64()),
        ("top1_jain", pa.float64()),
        *((f"pooled_{m}", pa.float64()) for m in METRICS),
        ("bytes_down", pa.int64()),
        ("bytes_up", pa.int64()),
        ("update_variance", pa.float64()),
    ]
)
"""One row per round, split, cohort, phase and model: mean and population standard deviation over clients.

Rows with ``cohort`` ``server`` and ``split`` ``official`` (``evaluation.official_test``) are about the server's own
model and the data set's official test part: ``clients`` is 0, the metrics are those of all its samples together, in
both columns, and what is about the spread over clients is null.

``top1_worst5`` is the mean of the lowest 5 % of the clients' accuracies, ``top1_jain`` their fairness index,
``pooled_*`` are the metrics of all samples together. A row whose model was chosen among a sweep says on what
(``selected_on``) and which (``choice``); ``test`` in ``selected_on`` marks a choice that has seen the test data.
Bytes are totals since the start. ``update_variance`` is the total variance of the cohort's updates of the last
linear layer, sum of ||D_k - mean D||^2 (Grinwald et al., NeurIPS 2024, eqs. 12 and 13); null for methods without
such updates, and in rows of all clients.
"""

_SIMULATED = pa.field("simulated_s", pa.float64())
SIMULATED_ROUNDS_SCHEMA = ROUNDS_SCHEMA.append(_SIMULATED)
"""``ROUNDS_SCHEMA`` with a simulated system: ``simulated_s`` is the virtual time at the round's end, in seconds."""

_PRODUCT_ERROR = pa.field("product_error", pa.float64())
"""Of runs that train adapters: how far the product of the cohort's mean factors is from the mean of their products
(``rayfl.models.pretrained.products``); null where these are not averaged together, and in rows of all clients."""

CLIP_NORM = "clip_norm"
_CLIP_NORM = pa.field(CLIP_NORM, pa.float64())
"""Of runs whose clipping norm moves (``privacy.target_quantile``): the one of the round."""

_STALENESS = (pa.field("staleness", pa.float64()), pa.field("staleness_max", pa.int32()))
_OWN_STALENESS = pa.field("staleness", pa.int32())
BUFFERED_ROUNDS_SCHEMA = SIMULATED_ROUNDS_SCHEMA.append(_STALENESS[0]).append(_STALENESS[1])
BUFFERED_CLIENTS_SCHEMA = CLIENTS_SCHEMA.append(_OWN_STALENESS)
"""The same with rounds without a barrier: how many steps the server has taken since a client began whose update is of
this round. ``rounds`` has mean and largest over these clients, null in a round without any; ``clients`` has each
client's, null in rows of clients of which the round has no update, and in those of all clients."""

SKIPPED_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("name", pa.string()),
        ("procedure", pa.string()),
        ("reason", pa.string()),
    ]
)
"""One row per client that failed and was left out (``clients.on_error``).

``procedure`` is the client's procedure that failed: one of the round's training, in which case the client had no part
in this round, as if it had not been sampled; or ``predictors``, in which case this round's evaluation is without it.
``system`` is a simulated system: the client was asked, but did not answer in time.
"""

DAMAGE_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("lost", pa.string()),
        ("client", pa.int32()),
        ("first_round", pa.int32()),
        ("last_round", pa.int32()),
        ("file", pa.string()),
        ("reason", pa.string()),
    ]
)
"""One row per thing that damage to files has cost a run; there is no such table where nothing was lost.

``round`` counts the completed rounds of the commit from which the run went on. ``lost`` is the name of a table, of
which the rows of the rounds from ``first_round`` to ``last_round`` are missing and ``client`` is null; or ``state``:
what ``client`` had learned in these rounds is lost, and it began again from its state before (``first_round`` 1: from
what a client never sampled has). ``file`` was damaged, and how says ``reason``.
"""

COHORTS_SCHEMA = pa.schema(
    [("round", pa.int32()), ("client", pa.int32()), ("loss", pa.float64()), ("count", pa.int32())]
)
"""One row per client that took part in a round, of runs whose cohorts cannot be drawn again from the seed: those with
``selection`` or simulated devices. ``loss`` is the mean loss of its training samples before the round, of the model
that it received; null where the selection did not need it. ``count`` is how often it counts in the means of the round:
1, or more where the selection says so."""

TABLES = {
    "clients": CLIENTS_SCHEMA,
    "rounds": ROUNDS_SCHEMA,
    "skipped": SKIPPED_SCHEMA,
    "calibration": CALIBRATION_SCHEMA,
}
"""The tables that every run has, by the name of their files."""

ALL_TABLES = {**TABLES, "cohorts": COHORTS_SCHEMA, "contributions": CONTRIBUTIONS_SCHEMA, "damage": DAMAGE_SCHEMA}
"""With those that only some runs have."""


def own_metrics(metrics: Sequence[Metric]) -> list[Metric]:
    """Those of a task's metrics that have columns of their own."""
    return [metric for metric in metrics if metric.name not in METRICS]


def unfit_metrics(metrics: Sequence[Metric]) -> str:
    """Returns why tables cannot have these metrics, in words; empty if they can."""
    if not any(metric.name == "loss" for metric in metrics):
        return "none of them is called loss, which reports show of every task"
    taken = {*CLIENTS_SCHEMA.names, *BUFFERED_ROUNDS_SCHEMA.names, *_LISTED, _PRODUCT_ERROR.name, CLIP_NORM}
    taken -= set(METRICS)
    for name in (metric.name for metric in metrics):
        columns = [name] if name in METRICS else [f"{prefix}{name}{suffix}" for prefix, suffix in _COLUMNS]
        if clash := next((column for column in columns if column in taken), None):
            return f"{name!r} makes a column {clash}, which tables have for something else"
        taken |= set(columns)
    return ""


def metrics_metadata(metrics: Sequence[Metric]) -> dict[bytes, bytes]:
    """Returns what :func:`metrics_of` reads; nothing for classification without further metrics."""
    if tuple(metrics) == CLASSIFICATION.metrics:
        return {}
    recorded = [{name: value for name, value in asdict(metric).items() if name != "ranked"} for metric in metrics]
    for metric, fields in zip(metrics, recorded, strict=True):
        fields |= {} if metric.ranked else {"ranked": False}  # which rayfl 0.1.0 does not know
    return {METRICS_KEY: json.dumps(recorded).encode()}


def metrics_of(table: pa.Table | pa.Schema) -> tuple[Metric, ...]:
    """Returns what the task of a run is judged by, as its tables say; the first counts most."""
    schema = table.schema if isinstance(table, pa.Table) else table
    recorded = (schema.metadata or {}).get(METRICS_KEY)
    return CLASSIFICATION.metrics if recorded is None else tuple(Metric(**fields) for fields in json.loads(recorded))


def first_metric(table: pa.Table | pa.Schema) -> Metric:
    """The metric by which models of a run are chosen and its clients are ranked, as its tables say."""
    return metrics_of(table)[0]


def schema_of(
    name: str,
    metrics: Sequence[Metric] = CLASSIFICATION.metrics,
    simulated: bool = False,
    buffered: bool = False,
    adapters: bool = False,
    adaptive: bool = False,
) -> pa.Schema:
    """The columns of a table, of a task with these metrics.

    The task's own come after those that all tasks have: in ``clients`` one for each, in ``rounds`` the mean over the
    clients for which it is defined, their standard deviation, and its value for all samples together; of the first also
    the mean of the worst 5 % and the fairness index.

    Args:
        name: of the table.
        metrics: of the task.
        simulated: whether devices are simulated.
        buffered: whether rounds have no barrier, which only simulated devices can have.
        adapters: whether adapters are trained.
        adaptive: whether the clipping norm moves.
    """
    own, schema = own_metrics(metrics), ALL_TABLES[name]
    added = []
    if name == "clients":
        added = [metric.name for metric in own]
    elif name == "rounds":
        added = [f"{prefix}{metric.name}{suffix}" for metric in own for prefix, suffix in _COLUMNS]
        added += [name for name in (f"{metrics[0].name}_worst5", f"{metrics[0].name}_jain") if name not in schema.names]
    for column in added:
        schema = schema.append(pa.field(column, pa.float64()))
    for field in _of_devices(name, simulated, buffered):
        schema = schema.append(field)
    further = [_PRODUCT_ERROR] * adapters + [_CLIP_NORM] * adaptive if name == "rounds" else []
    return pa.schema([*schema, *further])


def _of_devices(name: str, simulated: bool, buffered: bool) -> Sequence[pa.Field]:
    if name == "rounds" and simulated:
        return (_SIMULATED, *_STALENESS) if buffered else (_SIMULATED,)
    return (_OWN_STALENESS,) if name == "clients" and buffered else ()


_COLUMNS = (("", ""), ("", "_std"), ("pooled_", ""))
_LISTED = ("selected", "last", "skipped", "down", "up")
"""What lists of clients have beside their metrics (``rayfl.runs.listing``)."""


def known_schema(name: str, schema: pa.Schema) -> bool:
    """Returns whether a table of this name may have these columns."""
    try:
        metrics = metrics_of(schema)
    except (ValueError, TypeError):
        return False
    kinds = ((False, False), (True, False), (True, True))
    others = [key in (schema.metadata or {}) for key in (ADAPTERS_KEY, ADAPTIVE_KEY)]
    return any(schema.equals(schema_of(name, metrics, simulated, buffered, *others)) for simulated, buffered in kinds)


def data_metadata(partition: str, content: str | None) -> dict[bytes, bytes]:
    """What the metadata of all tables say of a run's data: who owns which sample, and the samples' checksum."""
    known = {} if content is None else {CONTENT_KEY: content.encode()}
    return {PARTITION_KEY: partition.encode(), **known}


def same_data(one: Mapping[bytes, bytes] | None, other: Mapping[bytes, bytes]) -> bool:
    """Returns whether tables with such metadata are about the same samples of the same clients, as far as is known."""
    contents = {metadata[CONTENT_KEY] for metadata in (one or {}, other) if CONTENT_KEY in metadata}
    return (one or {}).get(PARTITION_KEY) == other.get(PARTITION_KEY) and len(contents) < 2


def recorded_schema(name: str, metadata: Mapping[bytes, bytes], simulated: bool, buffered: bool) -> pa.Schema:
    """The columns of a table whose metadata are these; ``simulated`` and ``buffered`` as for :func:`schema_of`."""
    metrics = metrics_of(pa.schema([], dict(metadata)))
    schema = schema_of(name, metrics, simulated, buffered, ADAPTERS_KEY in metadata, ADAPTIVE_KEY in metadata)
    return schema.with_metadata(dict(metadata))
