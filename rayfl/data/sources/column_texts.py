"""Texts as rows of tokens: by a tokenizer that is learned from training rows, by one from a file, or as they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.table_files import owner
from rayfl.errors import DataError

PADDING, UNKNOWN = 0, 1
"""Fills a text up to its length; stands for what the training rows lack."""

_SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "characters": list,
    "words": lambda text: re.findall(r"\w+|[^\w\s]", text.lower()),
}


def read_texts(
    filled: Sequence[tuple[Path, pa.Table]],
    name: str,
    client: str | None,
    training: np.ndarray,
    tokenizer: str | None,
    length: int | None,
    vocabulary: int | None,
) -> tuple[np.ndarray, int, int]:
    """The texts of some files, one after the other.

    Args:
        filled: files and their tables, at least one row each.
        name: the column: text, or lists of tokens.
        client: the clients' column, for messages.
        training: which rows a tokenizer may be learned from, bool of shape (N,).
        tokenizer: ``characters``, ``words``, or a ``tokenizer.json`` (or a folder that has one) of the library
            tokenizers; None for lists of tokens.
        length: tokens of a row: longer texts are cut, shorter ones filled up with 0; None: those of the longest.
        vocabulary: most tokens that are learned, or how many there are.

    Returns:
        int32 of shape (N, length), the number of distinct tokens, and how many texts were cut.

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
    if tokenizer is None:
        rows, count = _as_they_are(texts, filled[0][0], name, vocabulary)
    elif tokenizer in _SPLITTERS:
        rows, count = _learned([_SPLITTERS[tokenizer](text) for text in texts], training, vocabulary)
    else:
        file = tokenizer_file(tokenizer)
        assert file is not None
        rows, count = _from_file(texts, file, vocabulary)
    width = max(1, max(map(len, rows))) if length is None else length
    x = np.full((len(rows), width), PADDING, dtype=np.int32)
    for place, row in enumerate(rows):
        x[place, : min(len(row), width)] = row[:width]
    return x, count, sum(len(row) > width for row in rows)


def _as_they_are(rows: list[list[int]], path: Path, name: str, vocabulary: int | None) -> tuple[list[list[int]], int]:
    flat = [token for row in rows for token in row]
    if any(token is None for token in flat):
        raise DataError(f"{path}: column {name!r} has a null among its tokens")
    least, most = min(flat, default=0), max(flat, default=0)
    if least < 0 or most >= (vocabulary or most + 1):
        bound = "" if vocabulary is None else f" and below dataset.vocabulary={vocabulary}"
        raise DataError(f"{path}: column {name!r} has tokens from {least} to {most}; they must be at least 0{bound}")
    return rows, vocabulary or most + 1


def _learned(rows: list[list[str]], training: np.ndarray, vocabulary: int | None) -> tuple[list[list[int]], int]:
    """Tokens by how often training rows have them, the most frequent first; of equally many in the order of signs."""
    counts = Counter(token for row, own in zip(rows, training, strict=True) if own for token in row)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = ranked if vocabulary is None else ranked[: max(0, vocabulary - 2)]
    number = {token: place for place, token in enumerate(kept, 2)}
    return [[number.get(token, UNKNOWN) for token in row] for row in rows], len(kept) + 2


def tokenizer_file(tokenizer: str | None) -> Path | None:
    """The file that a tokenizer is read from; None for one that is learned, or none."""
    if tokenizer is None or tokenizer in _SPLITTERS:
        return None
    place = Path(tokenizer).expanduser()
    return place / "tokenizer.json" if place.is_dir() else place


def _from_file(texts: list[str], path: Path, vocabulary: int | None) -> tuple[list[list[int]], int]:
    """By a tokenizer of the library tokenizers; its tokens are numbered from 1, since 0 is padding."""
    if not path.is_file():
        raise DataError(f"dataset.tokenizer: {path} does not exist; it may be characters, words, or a tokenizer.json")
    try:
        library = import_module("tokenizers")
    except ImportError:
        raise DataError(
            f"dataset.tokenizer: {path} needs the package tokenizers: pip install tokenizers, or set it to words or "
            "characters"
        ) from None
    try:
        found = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(f"dataset.tokenizer: {path} is no tokenizer of the library tokenizers: {error}") from error
    count = found.get_vocab_size() + 1
    if vocabulary not in (None, count):
        raise DataError(f"dataset.vocabulary is {vocabulary}, but {path} has {count} tokens, padding included")
    return [[token + 1 for token in encoded.ids] for encoded in found.encode_batch(texts)], count
