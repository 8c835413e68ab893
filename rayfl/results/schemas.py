"""The columns of a run's tables, and what their rows are."""

from __future__ import annotations

import pyarrow as pa

from rayfl.results.calibration import CALIBRATION_SCHEMA

PARTITION_KEY = b"rayfl.partition"
"""Where all tables' metadata have the hash of who owns which sample."""

PERSONALIZED_KEY, SWEEP_KEY = b"rayfl.personalized", b"rayfl.sweep"
"""Where they have the row that is the method's personalized model, and the prefix of the rows among which one is chosen
(only of methods that have such rows). Tables of older runs have neither; see ``rayfl.results.personalized``."""

CLIENTS_KEY = b"rayfl.clients"
"""Where they have K, the number of all clients; tables of older runs have not."""

METRICS = ("loss", "top1", "top5", "ece", "mce")

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

``round`` counts completed rounds. ``cohort`` is ``all`` (every client is evaluated) or ``selected`` (the clients
sampled in this round). ``phase`` is ``received`` (models as they are before local training) or ``trained`` (right
after the client's local training). The five metrics are those of the client's whole split. Bytes are those of the
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

SIMULATED_ROUNDS_SCHEMA = ROUNDS_SCHEMA.append(pa.field("simulated_s", pa.float64()))
"""``ROUNDS_SCHEMA`` with a simulated system: ``simulated_s`` is the virtual time at the round's end, in seconds."""

BUFFERED_ROUNDS_SCHEMA = SIMULATED_ROUNDS_SCHEMA.append(pa.field("staleness", pa.float64())).append(
    pa.field("staleness_max", pa.int32())
)
BUFFERED_CLIENTS_SCHEMA = CLIENTS_SCHEMA.append(pa.field("staleness", pa.int32()))
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

TABLES = {
    "clients": CLIENTS_SCHEMA,
    "rounds": ROUNDS_SCHEMA,
    "skipped": SKIPPED_SCHEMA,
    "calibration": CALIBRATION_SCHEMA,
}
"""The tables that every run has, by the name of their files."""

ALL_TABLES = {**TABLES, "damage": DAMAGE_SCHEMA}
"""With the one that only damaged runs have."""


def known_schema(name: str, schema: pa.Schema) -> bool:
    """Returns whether a table of this name may have these columns."""
    allowed = [
        ALL_TABLES[name],
        *(tables[name].schema for tables in map(simulated_tables, (False, True)) if name in tables),
    ]
    return any(schema.equals(one) for one in allowed)


def simulated_tables(buffered: bool) -> dict[str, pa.Table]:
    """The tables that have further columns with a simulated system, by name, without rows.

    Args:
        buffered: whether rounds have no barrier.
    """
    if not buffered:
        return {"rounds": SIMULATED_ROUNDS_SCHEMA.empty_table()}
    return {"rounds": BUFFERED_ROUNDS_SCHEMA.empty_table(), "clients": BUFFERED_CLIENTS_SCHEMA.empty_table()}
