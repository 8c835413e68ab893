"""Which columns of a user's own file are what: named by the user, or found by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rayfl.data.sources.columns.files import no_column
from rayfl.data.sources.columns.inputs import Layout
from rayfl.data.sources.columns.tables import Missing, is_category
from rayfl.data.sources.columns.targets import target_columns
from rayfl.errors import DataError
from rayfl.examples import Target

AUTO, NONE = "auto", "none"
_INPUTS = ("x", "image", "img")
_PREFIX = re.compile(r"x[\W_]?\w+")


@dataclass(frozen=True)
class Wanted:
    """Which columns are meant; ``auto`` finds them by name, ``none`` (clients and splits only) leaves them out.

    Attributes:
        client: the column with the client's name.
        split: the column with ``train`` or ``test``.
        x: the column with the inputs, or several with a number each.
        y: the column with the labels, or several.
        target: what is learned of the rows.
        tokens: whether the inputs are lists of tokens.
        tokenizer: of texts; see :mod:`rayfl.data.sources.columns.texts`.
        length: tokens of a text.
        vocabulary: number of tokens.
        padding: of lists of tokens, the one that fills them up.
        missing: what becomes of missing numbers.
        named: whether the columns are a table's, whatever their types.
        ignore: of masks, the value of pixels that do not count.
        group: of tables, the column that says of which group of people a row is.
    """

    client: str = AUTO
    split: str = AUTO
    x: str | tuple[str, ...] = AUTO
    y: str | tuple[str, ...] = AUTO
    target: Target = "class"
    tokens: bool = False
    tokenizer: str | None = None
    length: int | None = None
    vocabulary: int | None = None
    padding: int | None = 0
    missing: Missing = "error"
    named: bool = False
    ignore: int | None = None
    group: str | None = None

    @property
    def of_texts(self) -> bool:
        """Returns whether the inputs are texts or tokens."""
        return self.tokens or self.tokenizer is not None


def find_layout(path: Path, schema: pa.Schema, wanted: Wanted) -> Layout:
    """Returns which columns of a file are what; arguments and errors as for :func:`_find_layout`."""
    found = _find_layout(path, schema, wanted)
    if wanted.group is None:
        return found
    if found.kind != "table":
        raise DataError(
            f"{path}: dataset.group is for inputs that are named columns with a number or a category each, these are "
            f"{found.kind} in the column {found.x[0]!r}: name the inputs with dataset.x=[NAME, NAME, ...], or return "
            "Samples with groups from a function of your own (docs/group-fairness.md)"
        )
    if wanted.group in found.y:
        raise DataError(f"dataset.group: column {wanted.group!r} of {path} is to be learned (dataset.y): name another")
    return replace(found, group=_column(path, schema, "group", wanted.group, ()))


def _find_layout(path: Path, schema: pa.Schema, wanted: Wanted) -> Layout:
    """Returns which columns of a file are what.

    Args:
        path: the file, for messages.
        schema: its columns.
        wanted: which are meant.

    Raises:
        DataError: naming the file, its columns and the fix.
    """
    if wanted.target == "tokens" and not wanted.of_texts:
        raise DataError(
            f"{path}: next tokens are learned of texts: set dataset.tokenizer for a column of text, or "
            "dataset.kind=tokens for lists of tokens, or choose another task"
        )
    y = target_columns(path, schema, wanted.y, wanted.target)
    client = None if wanted.client == NONE else _column(path, schema, "client", wanted.client, ("client",))
    split = None if wanted.split == NONE else _column(path, schema, "split", wanted.split, ("split",))
    if wanted.x != AUTO:
        given = (wanted.x,) if isinstance(wanted.x, str) else wanted.x
        if not given:
            raise DataError(f"{path}: dataset.x names no column: name at least one, or leave it out")
        return _named_inputs(path, schema, given, Layout((), "table", y, client, split), wanted)
    if wanted.of_texts:
        return _texts(
            path, schema, _text_column(path, schema, wanted.tokens), Layout((), "texts", y, client, split), wanted
        )
    x = _column(path, schema, "x", AUTO, _INPUTS)
    taken = {x, *y, client, split}
    others = [field for field in schema if _PREFIX.fullmatch(field.name) and field.name not in taken]
    if x is not None:
        kind = _kind(path, schema.field(x))
        rivals = [f.name for f in others if kind == "numbers" or (f.name[-1].isdigit() and _is_number(f.type))]
        if rivals:
            of_what = "single numbers" if kind == "numbers" else "inputs"
            raise DataError(
                f"{path} has a column {x!r} of {of_what} and also {', '.join(rivals)}; name the inputs with dataset.x"
            )
        return Layout((x,), kind, y, client, split)
    if not any(_is_number(field.type) for field in others):
        raise DataError(
            f"{path} has no column x or image, nor numeric columns whose names begin with x, only "
            f"{', '.join(schema.names)}; name the inputs with dataset.x"
            + (", or, to read the column text, set dataset.tokenizer" if "text" in schema.names else "")
        )
    if wanted.named:
        return Layout(tuple(_in_order([field.name for field in others])), "table", y, client, split)
    for field in others:
        _check_number(path, field, others)
    return Layout(tuple(_in_order([field.name for field in others])), "numbers", y, client, split)


def _text_column(path: Path, schema: pa.Schema, tokens: bool) -> str:
    names = ("tokens", "input_ids", "x") if tokens else ("text", "x")
    found = [name for name in names if name in schema.names]
    if not found:
        raise DataError(
            f"{path} has no column {' or '.join(names)}, only {', '.join(schema.names)}; name the "
            f"{'tokens' if tokens else 'texts'} with dataset.x"
        )
    if len(found) > 1:
        raise DataError(f"{path} has columns {' and '.join(found)}; say which is meant with dataset.x")
    return found[0]


def _texts(path: Path, schema: pa.Schema, name: str, layout: Layout, wanted: Wanted) -> Layout:
    """The layout of texts, or of lists of tokens."""
    kind = schema.field(name).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if wanted.tokens:
        if not (lists and pa.types.is_integer(kind.value_type)):
            raise DataError(f"{path}: column {name!r} has the type {kind}; tokens are lists of integers")
        return replace(layout, x=(name,), kind="tokens")
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {name!r} has the type {kind}, but dataset.tokenizer is for text")
    return replace(layout, x=(name,), kind="texts")


def _column(path: Path, schema: pa.Schema, field: str, name: str, candidates: Sequence[str]) -> str | None:
    """The column that a field names, or the one among the candidates that there is.

    Raises:
        DataError: there is no such column, or several candidates.
    """
    if name != AUTO:
        if name not in schema.names:
            out = "" if field in ("x", "group") else f", or set dataset.{field}=none"
            raise no_column(field, path, name, schema, out)
        return name
    found = [candidate for candidate in candidates if candidate in schema.names]
    if len(found) > 1:
        raise DataError(f"{path} has columns {' and '.join(found)}; say which is meant with dataset.{field}")
    return found[0] if found else None


def _named_inputs(path: Path, schema: pa.Schema, names: Sequence[str], layout: Layout, wanted: Wanted) -> Layout:
    fields = [schema.field(str(_column(path, schema, "x", name, ()))) for name in names]
    if both := [name for name in names if name in layout.y]:
        raise DataError(f"dataset.x: column {both[0]!r} of {path} is to be learned (dataset.y): name it only once")
    if wanted.of_texts:
        if len(fields) > 1:
            raise DataError(f"dataset.x names {len(fields)} columns, but a text is one; of {path}, name one")
        return _texts(path, schema, names[0], layout, wanted)
    if len(fields) == 1 and not wanted.named and not is_category(fields[0].type):
        return replace(layout, x=(fields[0].name,), kind=_kind(path, fields[0]))
    if len(fields) == 1 and pa.types.is_string(fields[0].type) and not wanted.named:
        raise DataError(
            f"{path}: column {names[0]!r} is text: set dataset.tokenizer=words or characters to read it as text, or "
            "dataset.standardize or dataset.missing to take it for a category"
        )
    if wanted.named or any(is_category(field.type) for field in fields):
        for field in fields:
            if not is_category(field.type):
                _check_number(path, field, fields)
        return replace(layout, x=tuple(names), kind="table")
    for field in fields:
        _check_number(path, field, fields)
    return replace(layout, x=tuple(names), kind="numbers")


def _check_number(path: Path, field: pa.Field, inputs: Sequence[pa.Field]) -> None:
    """Refuses a column among several inputs that is none of numbers: without it, models would see something else."""
    if pa.types.is_null(field.type):
        raise DataError(
            f"{path}: column {field.name!r} has no value in any row: fill it, or leave it out of the inputs with "
            "dataset.x=[NAME, NAME, ...]"
        )
    if not _is_number(field.type):
        others = [other for other in inputs if other is not field]
        are = "numbers" if all(_is_number(other.type) for other in others) else "numbers or categories"
        raise DataError(
            f"{path}: column {field.name!r} has the type {field.type}, but the inputs beside it "
            f"({', '.join(other.name for other in others)}) are {are}: convert it, or name the inputs with "
            "dataset.x=[NAME, NAME, ...]"
        )


def unused(schema: pa.Schema, layout: Layout) -> list[str]:
    """Columns of numbers that are left out, where the inputs are columns of numbers, too."""
    found = [field.name for field in schema if _is_number(field.type) and field.name not in layout.names]
    return found if layout.kind in ("numbers", "table") else []


def _in_order(names: list[str]) -> list[str]:
    """By number where all names end in one (x2 before x10), else as the file has them."""
    ends = [re.search(r"\d+$", name) for name in names]
    if all(ends):
        return sorted(names, key=lambda name: int(re.search(r"\d+$", name).group()))  # type: ignore[union-attr]
    return names


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _kind(path: Path, field: pa.Field) -> Literal["numbers", "lists", "bytes", "files"]:
    kind = field.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "files"  # as the `datasets` library stores images
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if _is_number(kind.value_type):
            return "lists"
    if _is_number(kind):
        return "numbers"
    text = "; for texts set dataset.tokenizer" if pa.types.is_string(kind) else ""
    raise DataError(
        f"{path}: the column {field.name!r} has the type {kind}; inputs are lists of numbers, raw pixels or "
        f"encoded images (binary), or one number{text}"
    )
