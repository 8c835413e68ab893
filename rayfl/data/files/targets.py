"""What is known of a sample, as a column of a file: a number, or a list of them."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from rayfl.examples import InputSpec


def target_field(spec: InputSpec, of_class: pa.DataType) -> pa.Field:
    """The column ``y``.

    Args:
        spec: of the samples.
        of_class: the type of a class.
    """
    if spec.target in ("class", "ranking"):
        return pa.field("y", of_class, nullable=False)
    value = {"tokens": pa.int32(), "preference": pa.int32(), "mask": pa.int16(), "nodes": pa.int16()}.get(
        spec.target, pa.float32()
    )
    item = pa.field("item", value, nullable=False)
    return pa.field("y", pa.list_(item, math.prod(spec.target_shape)), nullable=False)


def to_column(y: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Targets of shape (n,) or (n, ...) as a column of a type that :func:`target_field` gave."""
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(y.astype(kind.to_pandas_dtype()))
    flat = np.ascontiguousarray(y).reshape(-1).astype(kind.value_type.to_pandas_dtype())
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)


def from_column(column: pa.Array) -> np.ndarray:
    """The inverse of :func:`to_column`; lists are rows."""
    if not pa.types.is_fixed_size_list(column.type):
        found: np.ndarray = column.to_numpy()
        return found
    rows: np.ndarray = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return rows
