"""A user's own graph in two tables: its nodes with their numbers and classes, and its edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayfl.errors import DataError
from rayfl.examples import SPLITS
from rayfl.naming.spelling import nearest

_ENDINGS = (".csv", ".parquet")
_NO_SPLIT = "none"


@dataclass(frozen=True, eq=False)
class NodeTable:
    """A graph as it was read.

    Attributes:
        numbers: float32 of shape (V, d).
        labels: classes by the rank of their names, int64 of shape (V,); -1 where there is none.
        classes: names of the classes.
        edges: distinct pairs of nodes, the smaller number first, int64 of shape (E, 2).
        clients: whose each node is, of shape (V,); None: there is no such column.
        splits: of each node a position in ``SPLITS``, -1 for none, int64 of shape (V,); None: there is no such column.
        remarks: what a user should be warned of.
    """

    numbers: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    edges: np.ndarray
    clients: np.ndarray | None
    splits: np.ndarray | None
    remarks: tuple[str, ...]


def read_nodes(folder: Path, node: str, label: str, client: str, split: str) -> NodeTable:
    """Reads ``nodes`` and ``edges``, each a .csv or .parquet file, in a folder.

    Args:
        folder: where they are.
        node: column of the nodes' names.
        label: column of their classes; no value: the node has none, and never counts.
        client: column of their clients, if there is one.
        split: column of their splits (``train``, ``validation``, ``test`` or ``none``), if there is one.

    Raises:
        DataError: naming the file, the column, the row and the fix.
    """
    place, table = _table(folder, "nodes", [node, label, client, split])
    for name in (node, label):
        if name not in table.column_names:
            known = ", ".join(table.column_names[:20])
            raise DataError(
                f"{place} has no column {name!r}{nearest(name, table.column_names)}, only {known}: name the columns "
                "with dataset.node and dataset.label"
            )
    if not table.num_rows:
        raise DataError(f"{place}: no rows")
    names = _texts(place, table, node)
    number: dict[str, int] = {}
    for row, name in enumerate(names):
        if number.setdefault(name, row) == row:
            continue
        raise DataError(f"{place}, row {row}: node {names[row]!r} is there a second time: remove one of the rows")
    given = table.column(label).to_pylist()
    classes, labels = _classes(place, label, given)
    named = [name for name in table.column_names if name not in (node, label, client, split)]
    numbers = [_numbers(place, table, name) for name in named]
    edges, remarks = _edges(folder, number)
    if absent := int((labels < 0).sum()):
        remarks.append(f"{absent} of {len(names)} nodes have no value in column {label!r}, and never count")
    return NodeTable(
        np.stack(numbers, 1) if named else np.empty((len(names), 0), np.float32),
        labels,
        classes,
        edges,
        np.array(_texts(place, table, client)) if client in table.column_names else None,
        _splits(place, table, split) if split in table.column_names else None,
        tuple(remarks),
    )


def _table(folder: Path, name: str, texts: Sequence[str]) -> tuple[Path, pa.Table]:
    known = [folder / f"{name}{ending}" for ending in _ENDINGS if (folder / f"{name}{ending}").is_file()]
    if len(known) != 1:
        wrong = "both are there" if known else "neither is there"
        raise DataError(f"dataset.path: {folder} must have {name}.csv or {name}.parquet, one of them: {wrong}")
    options = pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=True)
    try:
        if known[0].suffix == ".parquet":
            table = pq.read_table(known[0])
        else:
            table = pa.csv.read_csv(known[0], convert_options=options)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{known[0]} cannot be read: {str(error).strip()}") from error
    if twice := [column for column, count in Counter(table.column_names).items() if count > 1]:
        raise DataError(f"{known[0]} has the column {twice[0]!r} more than once: rename or remove one of them")
    return known[0], table


def _texts(place: Path, table: pa.Table, name: str) -> list[str]:
    """A column of names without gaps."""
    column = table.column(name)
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(f"{place}, column {name!r}, row {row}: no value; fill it in, or remove the row")
    if not (
        pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_integer(column.type)
    ):
        raise DataError(f"{place}: column {name!r} has the type {column.type}; names are texts or whole numbers")
    found: list[str] = column.cast(pa.string()).to_pylist()
    return found


def _classes(place: Path, name: str, given: Sequence[object]) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes, as numbers in their order if all are whole numbers, and that of each node."""
    known = {str(one) for one in given if one is not None}
    if not known:
        raise DataError(f"{place}, column {name!r}: no node has a class")
    whole = all(one.removeprefix("-").isdecimal() for one in known)
    # by their texts, too: 1 and 01 are two classes, and a set is in no order
    classes = sorted(known, key=lambda one: (int(one), one)) if whole else sorted(known)
    rank = {one: number for number, one in enumerate(classes)}
    return tuple(classes), np.array([-1 if one is None else rank[str(one)] for one in given], dtype=np.int64)


def _numbers(place: Path, table: pa.Table, name: str) -> np.ndarray:
    column = table.column(name)
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(
            f"{place}: column {name!r} has the type {kind}; all columns but those of names, classes, clients and "
            "splits are numbers of nodes: remove it, or make numbers of it"
        )
    with np.errstate(over="ignore"):
        values: np.ndarray = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy().astype(np.float32)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(
            f"{place}, column {name!r}, row {row}: no finite number of float32; fill it in, or remove the column"
        )
    return values


def _splits(place: Path, table: pa.Table, name: str) -> np.ndarray:
    given = _texts(place, table, name)
    known = {one: number for number, one in enumerate(SPLITS)} | {_NO_SPLIT: -1}
    for row, one in enumerate(given):
        if one not in known:
            raise DataError(f"{place}, column {name!r}, row {row}: {one!r} is none of {', '.join(known)}")
    return np.array([known[one] for one in given], dtype=np.int64)


def _edges(folder: Path, number: dict[str, int]) -> tuple[np.ndarray, list[str]]:
    place, table = _table(folder, "edges", ["source", "target"])
    if missing := [name for name in ("source", "target") if name not in table.column_names]:
        raise DataError(f"{place} has no column {missing[0]!r}, only {', '.join(table.column_names)}: rename it")
    ends = [_texts(place, table, name) for name in ("source", "target")]
    for row, pair in enumerate(zip(*ends, strict=True)):
        if unknown := [name for name in pair if name not in number]:
            raise DataError(f"{place}, row {row}: node {unknown[0]!r} is unknown: it has no row in the file of nodes")
    given = np.array([[number[name] for name in column] for column in ends], dtype=np.int64).T.reshape(-1, 2)
    edges = np.unique(np.sort(given, 1), axis=0)
    further = [name for name in table.column_names if name not in ("source", "target")]
    said = f"columns of edges are not read, since an edge is there or it is not: {', '.join(further)}"
    return edges, [said] if further else []
