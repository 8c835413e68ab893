"""The inputs in the columns of a user's own Parquet files: numbers, lists, raw bytes or encoded images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.images.images import count_turned, decode_images, is_encoded
from rayfl.data.sources.columns.files import owner
from rayfl.errors import DataError


@dataclass(frozen=True)
class Layout:
    """The columns of a file.

    Attributes:
        x: the inputs' columns: one, or many with a number each.
        kind: how the inputs are stored.
        y: the columns that are learned.
        client: the clients' column, if there is one.
        split: the splits' column, if there is one.
        group: the column that says of which group of people a row is, if there is one.
    """

    x: tuple[str, ...]
    kind: Literal["numbers", "lists", "bytes", "files", "table", "texts", "tokens"]
    y: tuple[str, ...]
    client: str | None
    split: str | None
    group: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns that are read, each once."""
        owners = (name for name in (self.client, self.split, self.group) if name is not None)
        return list(dict.fromkeys([*self.x, *self.y, *owners]))


def read_inputs(
    filled: Sequence[tuple[Path, pa.Table]], layout: Layout, shape: tuple[int, ...] | None, notes: list[str]
) -> np.ndarray:
    """The inputs of some files, one after the other: uint8 or float32 of shape (N, *shape).

    Args:
        filled: files and their tables, at least one row each.
        layout: the columns of all files.
        shape: shape of an input; None takes encoded images and lists as they are.
        notes: what a user should be warned of is added to them.

    Raises:
        DataError: naming file, column and, counted from 0, row.
    """
    if layout.kind == "files":
        return _encoded(filled, layout, shape, notes)
    return _plain(filled, layout, shape, notes)


def refuse_nulls(
    path: Path,
    table: pa.Table,
    name: str,
    client: str | None = None,
    fix: str = "",
    part: pa.ChunkedArray | None = None,
) -> None:
    """Raises DataError for the first null of a column, or of a part of it, with its client and a further remedy."""
    column = table.column(name) if part is None else part
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        whose = owner(table, client, row)
        raise DataError(f"{path}: column {name!r}, row {row}{whose} is null; fill it or remove the row{fix}")


def _plain(
    filled: Sequence[tuple[Path, pa.Table]], layout: Layout, shape: tuple[int, ...] | None, notes: list[str]
) -> np.ndarray:
    """Inputs that are stored as numbers or raw bytes."""
    if layout.kind == "bytes":
        first = filled[0][1].column(layout.x[0])
        refuse_nulls(*filled[0], layout.x[0], layout.client)
        if not len(first[0].as_py()):
            whose = owner(filled[0][1], layout.client, 0)
            raise DataError(
                f"{filled[0][0]}: column {layout.x[0]!r}, row 0{whose} is empty (0 bytes): fill it or remove the row"
            )
        raw = pa.types.is_fixed_size_binary(first.type)
        if not raw and is_encoded(first[0].as_py()) and (shape is None or len(first[0].as_py()) != _values(shape)):
            return _encoded(filled, layout, shape, notes)
        if shape is None:
            raise DataError(
                f"{filled[0][0]}: column {layout.x[0]!r} holds {len(first[0].as_py())} raw bytes a row; say with "
                "dataset.shape which images they are, for instance [1, 28, 28]"
            )
    read = {"numbers": _numbers, "lists": _lists, "bytes": _bytes}[layout.kind]
    parts = [read(path, table, layout) for path, table in filled]
    width, dtype = parts[0].shape[1], parts[0].dtype
    for (path, _), part in zip(filled, parts, strict=True):
        if part.shape[1] != width or part.dtype != dtype:
            raise DataError(
                f"{path}: inputs of {part.shape[1]} values ({part.dtype}), but {filled[0][0]} has {width} ({dtype})"
            )
    if shape is not None and _values(shape) != width:
        raise DataError(
            f"dataset.shape is {list(shape)}, {_values(shape)} values, but the inputs in {filled[0][0]} have {width}"
        )
    x = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return x.reshape(-1, *(shape or (width,)))


def _values(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _numbers(path: Path, table: pa.Table, layout: Layout) -> np.ndarray:
    names = layout.x
    for name in names:
        refuse_nulls(path, table, name, layout.client, ", or set dataset.missing=mean or dataset.missing=indicator")
    dtype = np.uint8 if all(table.column(name).type == pa.uint8() for name in names) else np.float32
    x = np.empty((table.num_rows, len(names)), dtype=dtype)
    for position, name in enumerate(names):
        with np.errstate(over="ignore"):  # what is too large is named below
            x[:, position] = table.column(name).to_numpy()
        _refuse_infinite(path, table, x[:, position : position + 1], name, layout.client)
    return x


def _lists(path: Path, table: pa.Table, layout: Layout) -> np.ndarray:
    names = layout.x
    column = table.column(names[0])
    refuse_nulls(path, table, names[0], layout.client)
    lengths = pc.list_value_length(column).to_numpy()
    if (other := np.flatnonzero(lengths != lengths[0])).size:
        whose = owner(table, layout.client, int(other[0]))
        raise DataError(
            f"{path}: column {names[0]!r}, row {other[0]}{whose} has {lengths[other[0]]} values, but row 0 has "
            f"{lengths[0]}: give every row as many"
        )
    if not lengths[0]:
        raise DataError(f"{path}: column {names[0]!r} has lists without values: name another with dataset.x")
    values = pc.list_flatten(column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py() // int(lengths[0])
        whose = owner(table, layout.client, row)
        raise DataError(
            f"{path}: column {names[0]!r}, row {row}{whose} has a null among its values: fill it or remove the row"
        )
    dtype = np.uint8 if values.type == pa.uint8() else np.float32
    with np.errstate(over="ignore"):  # what is too large is named below
        x: np.ndarray = values.to_numpy().astype(dtype, copy=False).reshape(table.num_rows, -1)
    _refuse_infinite(path, table, x, names[0], layout.client)
    return x


def _refuse_infinite(path: Path, table: pa.Table, x: np.ndarray, name: str, client: str | None) -> None:
    if x.dtype == np.float32 and not np.isfinite(x).all():
        row = int(np.argmax(~np.isfinite(x).all(axis=1)))
        whose = owner(table, client, row)
        raise DataError(
            f"{path}: column {name!r}, row {row}{whose} holds a value that is not finite in float32: remove the row, "
            "or mend it"
        )


def _bytes(path: Path, table: pa.Table, layout: Layout) -> np.ndarray:
    names = layout.x
    column = table.column(names[0])
    refuse_nulls(path, table, names[0], layout.client)
    lengths = pc.binary_length(column).to_numpy()
    if (other := np.flatnonzero(lengths != lengths[0])).size:
        whose = owner(table, layout.client, int(other[0]))
        raise DataError(
            f"{path}: column {names[0]!r}, row {other[0]}{whose} has {lengths[other[0]]} bytes, but row 0 has "
            f"{lengths[0]}: give all images one size"
        )
    fixed = column.cast(pa.binary(int(lengths[0])))
    chunks = [np.frombuffer(b"".join(chunk.to_pylist()), dtype=np.uint8) for chunk in fixed.chunks]
    return np.concatenate(chunks).reshape(table.num_rows, int(lengths[0]))


def image_files(filled: Sequence[tuple[Path, pa.Table]], layout: Layout) -> tuple[list[bytes], Callable[[int], str]]:
    """The encoded images of a column, and what to call each of them in messages."""
    name = layout.x[0]
    images: list[bytes] = []
    places: list[tuple[Path, int, pa.Table]] = []
    for path, table in filled:
        column = table.column(name)
        if layout.kind == "files":
            column = pc.struct_field(column, "bytes")
        refuse_nulls(path, table, name, layout.client, part=column)
        images.extend(column.to_pylist())
        places.extend((path, row, table) for row in range(table.num_rows))

    def place(image: int) -> str:
        path, row, table = places[image]
        return f"{path}: column {name!r}, row {row}{owner(table, layout.client, row)}"

    return images, place


def _encoded(
    filled: Sequence[tuple[Path, pa.Table]], layout: Layout, shape: tuple[int, ...] | None, notes: list[str]
) -> np.ndarray:
    """Inputs that are image files."""
    images, place = image_files(filled, layout)
    x = decode_images(len(images), images.__getitem__, place)
    if turned := count_turned(images):
        notes.append(
            f"{turned} of {len(images)} images say in their EXIF data that they are to be turned or mirrored, as "
            "cameras and phones write it, and are read as they are stored: to have them upright, save them again after "
            "Pillow's ImageOps.exif_transpose"
        )
    if shape not in (None, x.shape[1:]):
        raise DataError(f"dataset.shape is {list(shape or ())}, but the images have {list(x.shape[1:])}; leave it out")
    return x
