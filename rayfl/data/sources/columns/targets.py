"""What is learned of the rows of a user's own files: classes, labels, or numbers to predict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.soundness import SURVIVAL, unfit_targets
from rayfl.data.sources.columns.files import no_column, owner
from rayfl.data.sources.columns.inputs import refuse_nulls
from rayfl.errors import DataError
from rayfl.examples import Target

_NAMES = ("y", "label")
_SURVIVAL = ("time", "event")
_MASKS = ("y", "mask", "label")
_NUMBERED = re.compile(r"y[\W_]?\d+")
_MOST = np.iinfo(np.int64).max
_FIX = ": what is to be learned must be there"


def target_columns(path: Path, schema: pa.Schema, wanted: str | Sequence[str], target: Target) -> tuple[str, ...]:
    """The columns that are learned; none where the next token is, which is in the inputs.

    Args:
        path: the file.
        schema: its columns.
        wanted: ``auto``, a column or several.
        target: what they are.

    Raises:
        DataError: naming the file, its columns and the fix.
    """
    if target == "tokens":
        if wanted != "auto":
            raise DataError(
                f"{path}: dataset.y is {wanted}, but what is learned are the texts' next tokens: leave it out"
            )
        return ()
    if wanted != "auto":
        given = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for name in given:
            if name not in schema.names:
                raise no_column("y", path, name, schema)
        if target == "mask" and len(given) > 1:
            raise DataError(f"dataset.y names {len(given)} columns of {path}, but a mask is one: name one")
        if target == "survival" and not (len(given) == 2 or (len(given) == 1 and _is_nested(schema, given[0]))):
            raise DataError(
                f"dataset.y names {', '.join(given)} of {path}, but survival is learned of two columns, or of one of "
                "lists of two numbers: name the time and the event (1 if it was seen then, else 0), in this order"
            )
        if target == "class" and len(given) > 1:
            raise DataError(
                f"dataset.y names {len(given)} columns of {path}, but a class is one: name one, or set "
                "task=multilabel (columns of 0 and 1) or task=regression (numbers)"
            )
        return given
    if target == "survival":
        if "y" in schema.names:
            return target_columns(path, schema, "y", target)
        if all(name in schema.names for name in _SURVIVAL):
            return _SURVIVAL
        raise DataError(
            f"{path} has no columns {' and '.join(_SURVIVAL)}, only {', '.join(schema.names)}; name the column of the "
            "times and that of the events (1 if it was seen then, else 0) with dataset.y=[TIME, EVENT]"
        )
    names = _MASKS if target == "mask" else _NAMES
    found = [name for name in names if name in schema.names]
    if len(found) > 1:
        raise DataError(f"{path} has columns {' and '.join(found)}; say which is meant with dataset.y")
    if found:
        return (found[0],)
    several = target not in ("class", "mask")
    numbered = [name for name in schema.names if _NUMBERED.fullmatch(name)] if several else []
    if not numbered:
        raise DataError(
            f"{path} has no column {' or '.join(names)}, only {', '.join(schema.names)}; name it with dataset.y"
        )
    return tuple(numbered)


def read_targets(
    path: Path, table: pa.Table, names: Sequence[str], target: Target, client: str | None, renumbered: bool
) -> np.ndarray:
    """The targets of a file's rows: classes int64 or text of shape (N,); labels, numbers and survival float32 of shape
    (N, D).

    Args:
        path: the file.
        table: its columns.
        names: of :func:`target_columns`.
        target: what they are; no ``tokens``.
        client: the clients' column, for messages.
        renumbered: whether classes are numbered by their rank afterwards, so that negative ones and text will do.

    Raises:
        DataError: naming file, column, row, client and the fix.
    """
    if target == "class":
        return _classes(path, table, names[0], client, renumbered)
    first = table.column(names[0])
    if len(names) == 1 and pa.types.is_nested(first.type):
        values = _list(path, table, names[0], target, client)
    else:
        values = np.column_stack([_column(path, table, name, target, client) for name in names])
    if target == "survival" and values.shape[1] != 2:
        raise DataError(
            f"{path}: column {names[0]!r} has lists of {values.shape[1]} numbers; survival is learned of two, a time "
            "and an event (1 if it was seen then, else 0)"
        )
    wrong = unfit_targets(values, target)
    if wrong.any():
        row, place = (int(axis[0]) for axis in np.nonzero(wrong))
        name = names[place] if len(names) > 1 else names[0]
        must = "a number to predict is finite: remove the row, or mend it"
        if target == "labels":
            must = "a label is 0 or 1: mend the row, or set task=regression, if these are numbers to predict"
        if target == "survival":
            must = f"it must be {SURVIVAL[place]}: mend the row, or name the columns as dataset.y=[TIME, EVENT]"
        raise DataError(
            f"{path}: column {name!r}, row {row}{owner(table, client, row)} is {values[row, place]}; {must}"
        )
    return values


def _classes(path: Path, table: pa.Table, name: str, client: str | None, renumbered: bool) -> np.ndarray:
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    text = _is_text(column.type)
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type) or (text and renumbered)):
        numbers = pa.types.is_floating(column.type)
        if numbers and column.null_count < len(column) and _whole(column):
            refuse_nulls(path, table, name, client, _FIX)  # integers become floats where one is missing
        fix = ": dataset.labels=renumbered numbers the values that occur, in ascending order" if text else ""
        if numbers or pa.types.is_nested(column.type):
            fix = "; to predict numbers set task=regression" if numbers else "; for several labels set task=multilabel"
        raise DataError(f"{path}: column {name!r} has the type {column.type}; labels are integers from 0{fix}")
    refuse_nulls(path, table, name, client, _FIX)
    if text:
        names = np.asarray(column.to_pylist(), dtype=np.str_)
        if (empty := np.flatnonzero(np.char.strip(names) == "")).size:
            row = int(empty[0])
            raise DataError(f"{path}: column {name!r}, row {row}{owner(table, client, row)} is an empty text{_FIX}")
        return names
    found: np.ndarray = column.to_numpy()
    if len(large := np.flatnonzero(found > _MOST)):
        row = int(large[0])
        raise DataError(
            f"{path}: column {name!r}, row {row}{owner(table, client, row)} is {found[row]}; labels are at most "
            f"{_MOST}: store the column as text, with dataset.labels=renumbered"
        )
    labels = found.astype(np.int64)
    if len(labels) and labels.min() < 0 and not renumbered:
        row = int(np.argmax(labels < 0))
        raise DataError(
            f"{path}: column {name!r}, row {row}{owner(table, client, row)} is {labels[row]}; labels are integers from "
            "0, or any with dataset.labels=renumbered"
        )
    return labels


def _is_nested(schema: pa.Schema, name: str) -> bool:
    return bool(pa.types.is_nested(schema.field(name).type))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _whole(column: pa.ChunkedArray) -> bool:
    """Returns whether all numbers that are there are integers."""
    return bool(pc.all(pc.equal(column, pc.round(column))).as_py())


def _column(path: Path, table: pa.Table, name: str, target: Target, client: str | None) -> np.ndarray:
    column = table.column(name)
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        need, mend = "numbers to predict are numbers", "store numbers in it"
        if target == "labels":
            need, mend = "labels are columns of 0 and 1", "store 0 and 1 in it"
        raise DataError(
            f"{path}: column {name!r} has the type {kind}; {need}, or one column of lists of them: {mend}, name "
            "another column with dataset.y, or, if these are classes, number them and set task=classification"
        )
    refuse_nulls(path, table, name, client, _FIX)
    values: np.ndarray = (
        column.cast(pa.float64(), safe=False).to_numpy() if not pa.types.is_boolean(kind) else np.asarray(column)
    )
    with np.errstate(over="ignore"):  # what is too large is named by the caller
        return values.astype(np.float32)


def _list(path: Path, table: pa.Table, name: str, target: Target, client: str | None) -> np.ndarray:
    """One column of lists of equal length."""
    refuse_nulls(path, table, name, client, _FIX)
    column = table.column(name)
    lengths = pc.list_value_length(column).to_numpy()
    if (other := np.flatnonzero(lengths != lengths[0])).size:
        row = int(other[0])
        raise DataError(
            f"{path}: column {name!r}, row {row}{owner(table, client, row)} has {lengths[row]} values, but row 0 has "
            f"{lengths[0]}: give every row one for each {'label' if target == 'labels' else 'number'}"
        )
    if not lengths[0]:
        raise DataError(f"{path}: column {name!r} has lists without values{_FIX}, or name another with dataset.y")
    values = pc.list_flatten(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py() // int(lengths[0])
        raise DataError(f"{path}: column {name!r}, row {row}{owner(table, client, row)} has a null among its values")
    found: np.ndarray = np.asarray(values).astype(np.float32).reshape(table.num_rows, -1)
    return found
