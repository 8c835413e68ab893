"""Masks in the columns of a user's own files: lists of integers, or images whose pixels are classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from rayfl.data.images.images import decode_masks, is_encoded
from rayfl.data.sources.columns.files import owner
from rayfl.data.sources.columns.inputs import Layout, image_files, read_inputs
from rayfl.data.sources.targets import mask_classes, ranked, without
from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED

_MOST = 2**15


def read_masks(
    filled: Sequence[tuple[Path, pa.Table]],
    name: str,
    client: str | None,
    shape: tuple[int, ...],
    renumbered: bool,
    ignored: int | None = None,
) -> tuple[np.ndarray, int]:
    """The masks of some files, int16 of shape (N, H, W) or (N, H, W, D), and how many classes occur in them.

    Args:
        filled: files and their tables, at least one row each.
        name: of the column.
        client: the clients' column, for messages.
        shape: of an image, channels first.
        renumbered: whether classes are numbered from 0 by their rank, such as 0 and 255.
        ignored: the value of pixels that do not count, in addition to ``IGNORED``.

    Raises:
        DataError: naming file, column, row, client and the fix.
    """
    path, table = filled[0]
    if len(shape) not in (3, 4):
        raise DataError(
            f"{path}: the inputs have the shape {shape}, but masks belong to images (channels, height, width) or "
            "volumes (channels, height, width, depth): say with dataset.shape what the inputs are"
        )
    kind = _kind(path, table, name)
    lists = kind == "lists"
    layout = Layout((name,), kind, (), client, None)
    if lists:
        values = read_inputs(filled, layout, None, [])
    else:
        images, place = image_files(filled, layout)
        values = decode_masks(len(images), images.__getitem__, place)
    sides = shape[1:]
    if values[0].size != math.prod(sides) or (not lists and values.shape[1:] != sides):
        found = f"{values.shape[1]} values" if lists else f"{values.shape[1]} x {values.shape[2]} pixels"
        raise DataError(
            f"{path}: masks in column {name!r} have {found}, but images have {' x '.join(map(str, sides))}: bring both "
            "to one size"
        )
    masks = without(values.reshape(len(values), *sides), ignored)
    wrong = ((masks < 0) & (masks != IGNORED)) | (masks >= _MOST)
    if wrong.any():
        row = int(np.argmax(wrong.reshape(len(masks), -1).any(1)))
        where, own, at = _place(filled, row)
        found = f"{masks[row][wrong[row]][0]:g}"
        raise DataError(
            f"{where}: column {name!r}, row {at}{owner(own, client, at)} has a pixel of class {found}; classes are "
            f"numbers from 0 to {_MOST - 1}, and {IGNORED} where none counts"
        )
    present = mask_classes(masks, f"{path}: column {name!r}")
    return ranked(masks, present) if renumbered else masks.astype(np.int16), len(present)


def _kind(path: Path, table: pa.Table, name: str) -> Literal["lists", "files", "bytes"]:
    """Returns how the masks are stored, as :class:`Layout` has it."""
    kind = table.schema.field(name).type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_integer(kind.value_type):
            return "lists"
    elif pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "files"
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        first = table.column(name)[0].as_py()
        if first is None or is_encoded(first):
            return "bytes"
    raise DataError(
        f"{path}: column {name!r} has the type {kind}; masks are lists of integers, a class for each pixel, or grey "
        "images (PNG) or such with a palette"
    )


def _place(filled: Sequence[tuple[Path, pa.Table]], row: int) -> tuple[Path, pa.Table, int]:
    """Where a row of all files is: the file, its table, and the row in it."""
    for path, table in filled:
        if row < table.num_rows:
            return path, table, row
        row -= table.num_rows
    raise IndexError(row)
