"""Texts, and lists of tokens, as rows of tokens of one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.columns.files import owner
from rayfl.data.sources.tokens.tokenizers import Tokenized, tokenized
from rayfl.errors import DataError

_MOST = np.iinfo(np.int32).max
"""Tokens are smaller, so that one more can fill up."""


@dataclass(frozen=True)
class TextOptions:
    """How texts are read.

    Attributes:
        tokenizer: ``characters``, ``words``, ``basic_english``, or a ``tokenizer.json`` (or a folder that has one) of
            the library tokenizers; None for lists of tokens.
        length: tokens of a row: longer texts are cut, shorter ones filled up; None: those of the longest.
        vocabulary: most tokens that are learned, or how many there are.
        padding: of lists of tokens, the one that fills them up; None: none does.
    """

    tokenizer: str | None
    length: int | None
    vocabulary: int | None
    padding: int | None = 0


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Texts as rows of tokens.

    Attributes:
        x: int32 of shape (N, T).
        lengths: how many tokens of each are no padding, int64 of shape (N,).
        vocabulary: how many distinct tokens there are, padding included.
        padding: what fills up.
        cut: how many texts were cut.
        inner: how many texts have ``padding`` before other tokens.
    """

    x: np.ndarray
    lengths: np.ndarray
    vocabulary: int
    padding: int
    cut: int
    inner: int


def read_texts(
    filled: Sequence[tuple[Path, pa.Table]], name: str, client: str | None, training: np.ndarray, options: TextOptions
) -> TokenRows:
    """The texts of some files, one after the other.

    Args:
        filled: files and their tables, at least one row each.
        name: the column: text, or lists of tokens.
        client: the clients' column, for messages.
        training: which rows a tokenizer may be learned from, bool of shape (N,).
        options: how they are read.

    Raises:
        DataError: naming file, column, row, client and the fix.
    """
    texts: list[Any] = []
    for path, table in filled:
        column = table.column(name)
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{path}: column {name!r}, row {row}{owner(table, client, row)} is null; fill it or remove the row"
            )
        texts += column.to_pylist()
    if options.tokenizer is None:
        places = [(path, row, table) for path, table in filled for row in range(table.num_rows)]

        def place(text: int) -> str:
            path, row, table = places[text]
            return f"{path}: column {name!r}, row {row}{owner(table, client, row)}"

        found = _as_they_are(texts, place, options)
    else:
        found = tokenized(texts, options.tokenizer, training, options.length, options.vocabulary)
    width = max(1, max(map(len, found.rows))) if options.length is None else options.length
    return _filled_up(found, width)


def _filled_up(found: Tokenized, width: int) -> TokenRows:
    x = np.full((len(found.rows), width), found.padding, dtype=np.int32)
    for place, row in enumerate(found.rows):
        x[place, : min(len(row), width)] = row[:width]
    tokens = x != found.padding
    lengths = (tokens * np.arange(1, width + 1)).max(axis=1)
    cut = found.cut + sum(len(row) > width for row in found.rows)
    return TokenRows(x, lengths, found.vocabulary, found.padding, cut, int((tokens.sum(1) < lengths).sum()))


def _as_they_are(rows: list[list[int]], place: Callable[[int], str], options: TextOptions) -> Tokenized:
    bound = min(options.vocabulary or _MOST, _MOST)
    below = f"dataset.vocabulary={bound}" if bound == options.vocabulary else f"{bound}"
    most = 0
    for number, row in enumerate(rows):
        if any(token is None for token in row):
            raise DataError(f"{place(number)} has a null among its tokens: fill it or remove the row")
        least, most = min(row, default=0), max(most, *row, 0)
        if least < 0 or most >= bound:
            raise DataError(
                f"{place(number)} has the token {least if least < 0 else most}; tokens are at least 0 and below {below}"
            )
    count = options.vocabulary or most + 1
    padding = count if options.padding is None else options.padding
    return Tokenized(rows, max(count, padding + 1), padding)
