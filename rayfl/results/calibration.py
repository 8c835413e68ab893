"""Reliability: how often predictions of some confidence are right, bin by bin, for the samples of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rayfl.metrics import Statistics
from rayfl.metrics.classification import ClassificationMeasures

CALIBRATION_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("split", pa.string()),
        ("cohort", pa.string()),
        ("phase", pa.string()),
        ("model", pa.string()),
        ("selected_on", pa.string()),
        ("choice", pa.string()),
        ("bin", pa.int32()),
        ("n", pa.int64()),
        ("confidence", pa.float64()),
        ("accuracy", pa.float64()),
    ]
)
"""One row per non-empty bin of every row of ``rounds.parquet`` that is about all clients.

``bin`` b of 1..15 has the samples whose confidence is in ((b - 1) / 15, b / 15] (Guo et al., 2017), ``n`` of them;
``confidence`` is their mean confidence, ``accuracy`` the share that is predicted rightly. ``pooled_ece`` and
``pooled_mce`` of the row in ``rounds.parquet`` are the mean, weighted by ``n``, and the maximum of
``|accuracy - confidence|``.
"""

_KEYS = [name for name in CALIBRATION_SCHEMA.names if name not in ("bin", "n", "confidence", "accuracy")]


def bin_rows(summary: Mapping[str, Any], pooled: Statistics) -> list[dict[str, Any]]:
    """The rows, schema :data:`CALIBRATION_SCHEMA`, that belong to a row of ``rounds.parquet``.

    Args:
        summary: that row.
        pooled: statistics of all samples it is about.

    Returns:
        None of a task that gives no confidences.
    """
    if not isinstance(pooled.measures, ClassificationMeasures):
        return []
    key = {name: summary[name] for name in _KEYS}
    return [
        {
            **key,
            "bin": number,
            "n": int(count),
            "confidence": float(confidence / count),
            "accuracy": float(hits / count),
        }
        for number, (count, confidence, hits) in enumerate(pooled.bins().T, start=1)
        if count
    ]
