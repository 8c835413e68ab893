"""Columns of a data set of Hugging Face as plain columns: classes, images, arrays and lists without their wrapping."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.huggingface.files import Split
from rayfl.errors import DataError

SPLIT_COLUMN = "(split)"
"""A column that says of which part a row is; added here."""

_LISTS = ("List", "LargeList", "Sequence")
_TAKEN = "numbers, text, ClassLabel, Image, lists of numbers or of ClassLabel, and arrays (Array2D to Array5D)"


class SplitTable:
    """A split as rows with plain columns (:class:`rayfl.data.sources.columns.files.NamedTable`).

    Classes are their numbers where they are learned, else their names. Arrays are lists of numbers of a known shape.

    Args:
        split: the split.
        learned: columns whose classes are numbers.
        part: ``train`` or ``test``, for :data:`SPLIT_COLUMN`; None: without that column.
        client: the clients' column, for messages.

    Attributes:
        path: where it is, for messages.
        schema: the plain columns; those of features that are not taken are as they are stored.
        classes: by column, how many classes its feature names.
        shapes: by column of arrays, their shape.
    """

    def __init__(self, split: Split, learned: Collection[str], part: str | None, client: str | None = None) -> None:
        self.path = split.path
        self._split, self._learned, self._part, self._client = split, frozenset(learned), part, client
        self.classes: dict[str, int] = {
            name: feature.num_classes for name, feature in split.features.items() if _kind(feature) == "ClassLabel"
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        fields = [pa.field(field.name, self._type(field)) for field in split.schema]
        self.schema = pa.schema([*fields, *([] if part is None else [pa.field(SPLIT_COLUMN, pa.string())])])

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all rows.

        Raises:
            DataError: a column is of a feature that is not taken, or cannot be read.
        """
        stored = [name for name in names if name != SPLIT_COLUMN]
        for name in stored:
            self._check_taken(name)
        try:
            table = self._split.read(stored)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {str(error).strip()}") from error
        columns = {name: self._plain(name, table.column(name)) for name in stored}
        if self._part is not None and SPLIT_COLUMN in names:
            columns[SPLIT_COLUMN] = pa.array([self._part] * table.num_rows, pa.string())
        return pa.table({name: columns[name] for name in names})

    def _type(self, field: pa.Field) -> pa.DataType:
        feature = self._split.features.get(field.name)
        kind = _kind(feature)
        if kind == "ClassLabel":
            return pa.int64() if field.name in self._learned else pa.string()
        if (dtype := _array_of(feature)) is not None:
            return pa.list_(dtype)
        if field.name in self._learned and kind in _LISTS and _kind(_inner(feature)) == "ClassLabel":
            return pa.list_(pa.float32())
        return field.type

    def _check_taken(self, name: str) -> None:
        feature = self._split.features.get(name)
        kind = _kind(feature)
        inner = _kind(_inner(feature))
        if kind in ("Value", "ClassLabel", "Image") or _array_of(feature) is not None:
            return
        if kind in _LISTS and (inner == "Value" or (inner == "ClassLabel" and name in self._learned)):
            return
        of = f" of {inner}" if kind in _LISTS else ""
        raise DataError(
            f"{self.path}: column {name!r} is of the feature {kind}{of}, which rayfl does not take; it takes {_TAKEN}: "
            "turn it into one of these with map or cast_column, and save the data set again"
        )

    def _plain(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
        feature = self._split.features[name]
        kind = _kind(feature)
        if kind == "ClassLabel":
            return self._classes(name, column, feature)
        if kind == "Image":
            return self._images(name, column)
        if (dtype := _array_of(feature)) is not None:
            return self._arrays(name, column, dtype)
        if kind in _LISTS and _kind(_inner(feature)) == "ClassLabel":
            return _indicators(column, _inner(feature).num_classes)
        return column

    def _classes(self, name: str, column: pa.ChunkedArray, feature: Any) -> pa.ChunkedArray | pa.Array:
        column = column.cast(pa.int64())
        if name not in self._learned:
            return pa.array(
                [None if code is None or code < 0 else feature.int2str(code) for code in column.to_pylist()]
            )
        if (row := pc.index(pc.less(column, 0), True).as_py()) >= 0:
            raise DataError(
                f"{self._place(name, row)} is {column[row].as_py()}, which says that its class is not "
                "known: take splits whose classes are, with dataset.train and dataset.test (none, or another split)"
            )
        return column

    def _images(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
        """Images that are kept beside the data set are read; none is fetched from elsewhere."""
        held = pc.struct_field(column, "bytes")
        if not held.null_count:
            return column
        paths = pc.struct_field(column, "path").to_pylist()
        found = []
        for row, (content, path) in enumerate(zip(held.to_pylist(), paths, strict=True)):
            if content is None and path is not None:
                try:
                    content = Path(path).read_bytes()
                except OSError as error:
                    raise DataError(
                        f"{self._place(name, row)} is the image {path}, which cannot be read "
                        f"({error.strerror}): put it there, or save the data set again with save_to_disk"
                    ) from error
            found.append({"bytes": content, "path": path})
        return pa.array(found, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))

    def _place(self, name: str, row: int) -> str:
        """Returns what to call a row in messages, with its client."""
        whose = ""
        if self._client is not None and self._client in self._split.features:
            client = self.read([self._client]).column(self._client)[row].as_py()
            whose = f" (client {client!r})"
        return f"{self.path}: column {name!r}, row {row}{whose}"

    def _arrays(self, name: str, column: pa.ChunkedArray, dtype: pa.DataType) -> pa.Array:
        """Nested lists as flat ones, of one shape."""
        values = column.combine_chunks()
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        rows, each, shape = len(values), 1, []
        while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(
            values.type
        ):  # fmt: skip
            lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
            if rows and (other := np.flatnonzero(lengths != lengths[0])).size:
                row = int(other[0]) // each
                raise DataError(
                    f"{self._place(name, row)} has another shape than row 0, or is null: give all "
                    "arrays one shape, or remove the row"
                )
            shape.append(int(lengths[0]) if rows else 0)
            each *= max(shape[-1], 1)
            values = pc.list_flatten(values)
        if values.null_count:
            row = pc.index(pc.is_null(values), True).as_py() // each
            raise DataError(f"{self._place(name, row)} has a null among its values: fill it or remove the row")
        self.shapes[name] = tuple(shape)
        flat = pa.FixedSizeListArray.from_arrays(values.cast(dtype), math.prod(shape))
        return flat.cast(pa.list_(dtype))


def check_same_classes(splits: Sequence[Split], learned: Collection[str]) -> None:
    """Makes sure that a number means the same class in all splits, of which one may know more classes than another.

    Args:
        splits: those that are read together.
        learned: columns whose classes are numbers.

    Raises:
        DataError: naming column, class and both splits.
    """
    for name in learned:
        known: tuple[list[str], Path] | None = None
        for split in splits:
            feature: Any = split.features.get(name)
            listed = _kind(feature) in _LISTS
            feature = _inner(feature) if listed else feature
            if _kind(feature) != "ClassLabel":
                continue
            names, path = known = known or (feature.names, split.path)
            pairs = enumerate(zip_longest(feature.names, names))
            other = next((pair for pair in pairs if pair[1][0] != pair[1][1] and (listed or None not in pair[1])), None)
            if other is not None:
                number, (here, there) = other
                raise DataError(
                    f"{split.path}: class {number} of column {name!r} is {here!r}, but that of {path} is {there!r}: "
                    "give all splits the same classes in one order with cast_column, or leave a split out with "
                    "dataset.train and dataset.test"
                )
            if len(feature.names) > len(names):
                known = feature.names, split.path


def _kind(feature: Any) -> str:
    """The class of a feature; older data sets write a list as a Python list of one feature."""
    return "List" if isinstance(feature, list) else type(feature).__name__


def _inner(feature: Any) -> Any:
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _array_of(feature: Any) -> pa.DataType | None:
    """The type of an array's numbers; None for features that are no arrays. Lists of lists are some, too."""
    if _kind(feature).startswith("Array"):
        return pa.type_for_alias(feature.dtype)
    depth = 0
    while _kind(feature) in _LISTS:
        feature, depth = _inner(feature), depth + 1
    if depth < 2 or _kind(feature) != "Value":
        return None
    dtype = feature.pa_type
    return dtype if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) else None


def _indicators(column: pa.ChunkedArray, count: int) -> pa.Array:
    """Lists of classes as 0 and 1 for each class; a null stays one."""
    rows = column.to_pylist()
    found = [None if row is None else np.isin(np.arange(count), row).astype(np.float32) for row in rows]
    return pa.array(found, pa.list_(pa.float32()))
