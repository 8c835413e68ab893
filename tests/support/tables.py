"""Tables as users have them, written as Parquet or CSV and opened by a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rayfl.data.federated import FederatedDataset
from rayfl.data.images.transform import TransformConfig
from rayfl.data.opening import open_dataset
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.labelled import Labelled
from rayfl.data.partitions.long_tail import LongTail
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.randomness import RandomStreams

INPUTS = ["age", "bmi", "sex"]
AGES = [30.0, 40.0, 50.0, 60.0, 35.0, 45.0, 55.0, 65.0, 20.0, 80.0, 25.0, 75.0]
ROWS: dict[str, list[Any]] = {
    "age": AGES,
    "bmi": [20.0 + (7 * i) % 11 for i in range(12)],
    "sex": ["f", "m"] * 6,
    "smokes": [True, False, False] * 4,
    "outcome": [i % 2 for i in range(12)],
    "days": [1.5 * age for age in AGES],
    "weeks": [0.5 * age for age in AGES],
    "cough": [i % 2 for i in range(12)],
    "fever": [i % 3 == 0 for i in range(12)],
    "hospital": ["A"] * 4 + ["B"] * 4 + ["C"] * 4,
    "note": ["the cat sat", "a dog sat on the cat", "cat", "dog"] * 3,
    "split": ["train", "train", "train", "test"] * 3,
}


def written(folder: Path, kind: str = "parquet", **changes: Any) -> Path:
    """The rows as a file; a change replaces a column, or removes it (None)."""
    columns = {name: values for name, values in {**ROWS, **changes}.items() if values is not None}
    path = folder / f"rows.{kind}"
    table = pa.table(columns)
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def own_section(
    folder: Path, form: str = "parquet", changes: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """The section ``dataset`` of the rows as a file, some columns changed."""
    return {"path": written(folder, form, **(changes or {})), "root": folder, "client": "hospital", **options}


def opened(
    source: Mapping[str, Any],
    target: str = "class",
    partition: Any = None,
    transform: TransformConfig | None = None,
    **holdout: float,
) -> FederatedDataset:
    sections = SimpleNamespace(
        dataset=ParquetSource(**source),
        task=SimpleNamespace(target=target),
        partition=partition or NaturalPartition(),
        holdout=HoldoutConfig(**holdout),
        long_tail=LongTail(),
        noise=LabelNoise(),
        labelled=Labelled(),
        transform=transform or TransformConfig(),
    )
    return open_dataset(sections, RandomStreams(0))
