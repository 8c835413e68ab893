"""Tokenizers: learned from training rows, or a file of the library tokenizers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.data.files.whole import file_digest
from rayfl.errors import DataError
from rayfl.examples import BYTE_TOKENS, byte_tokens

PADDING, UNKNOWN = 0, 1
"""Fills a text up to its length; stands for what the training rows lack. Of tokenizers that are learned."""

SETTINGS = "tokenizer_config.json"
"""Stands beside a tokenizer's file, and names its special tokens."""

CHAT_FILE = "chat_template.jinja"
"""Stands beside a tokenizer's file, where its settings do not have the chat template."""

BYTES = "bytes"
"""The tokenizer of :func:`rayfl.examples.byte_tokens`."""

_USUAL_PADDING = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")
_BASIC = (
    (r"<br />", " "),
    (r"'", " '  "),
    (r'"', ""),
    (r"\.", " . "),
    (r",", " , "),
    (r"([()!?])", r" \1 "),
    (r"[;:]", " "),
)


def _basic_english(text: str) -> list[str]:
    """torchtext's ``basic_english``: lower-case words and signs, without double quotes, semicolons and colons."""
    text = text.lower()
    for pattern, replacement in _BASIC:
        text = re.sub(pattern, replacement, text)
    return text.split()


_SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "characters": list,
    "words": lambda text: re.findall(r"\w+|[^\w\s]", text.lower()),
    "basic_english": _basic_english,
}


LEARNED = tuple(_SPLITTERS)
"""Tokenizers whose tokens are those of texts that are read."""


@dataclass(frozen=True)
class Tokenized:
    """Texts as tokens.

    Attributes:
        rows: the tokens of each text.
        vocabulary: how many distinct ones there are, padding included.
        padding: what fills up.
        cut: how many texts were cut already.
    """

    rows: Sequence[Sequence[int]]
    vocabulary: int
    padding: int
    cut: int = 0


def tokenized(
    texts: list[str], tokenizer: str, training: np.ndarray, length: int | None, vocabulary: int | None
) -> Tokenized:
    """Texts as tokens; see :func:`rayfl.data.sources.columns.texts.read_texts`.

    Raises:
        DataError: naming the tokenizer's file and the fix.
    """
    if tokenizer in _SPLITTERS:
        rows, count = _learned([_SPLITTERS[tokenizer](text) for text in texts], training, vocabulary)
        return Tokenized(rows, count, PADDING)
    if tokenizer == BYTES:
        if vocabulary not in (None, BYTE_TOKENS):
            raise DataError(
                f"dataset.vocabulary is {vocabulary}, but tokenizer={BYTES} has {BYTE_TOKENS} tokens: leave the option "
                "out"
            )
        return Tokenized([byte_tokens(text) for text in texts], BYTE_TOKENS, PADDING)
    file = tokenizer_file(tokenizer)
    assert file is not None
    return _from_file(texts, file, length, vocabulary)


def tokenizer_file(tokenizer: str | None) -> Path | None:
    """The file that a tokenizer is read from; None for one that is learned, or none."""
    if tokenizer is None or tokenizer in (*_SPLITTERS, BYTES):
        return None
    place = Path(tokenizer).expanduser()
    return place / "tokenizer.json" if place.is_dir() else place


def tokenizer_digest(tokenizer: str | None, chats: bool = False) -> str | None:
    """The checksum of a tokenizer's file, and of the one beside it that names its special tokens; None without one.

    Args:
        tokenizer: the file, or a folder with it.
        chats: whether a chat template in a file of its own counts.
    """
    file = tokenizer_file(tokenizer)
    if file is None or not file.is_file():
        return None
    beside = [file.with_name(name) for name in ((SETTINGS, CHAT_FILE) if chats else (SETTINGS,))]
    parts = [file_digest(one) for one in (file, *beside) if one.is_file()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _learned(rows: list[list[str]], training: np.ndarray, vocabulary: int | None) -> tuple[list[list[int]], int]:
    """Tokens by how often training rows have them, the most frequent first; of equally many in the order of signs."""
    counts = Counter(token for row, own in zip(rows, training, strict=True) if own for token in row)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = ranked if vocabulary is None else ranked[: max(0, vocabulary - 2)]
    number = {token: place for place, token in enumerate(kept, 2)}
    return [[number.get(token, UNKNOWN) for token in row] for row in rows], len(kept) + 2


def _from_file(texts: list[str], path: Path, length: int | None, vocabulary: int | None) -> Tokenized:
    """By a tokenizer of the library tokenizers, whose numbers the tokens keep.

    Its own padding fills up: what the file, or ``tokenizer_config.json`` beside it, says, or a token with a usual name
    for it; else a token of its own after all others.
    """
    found = library_tokenizer(path)
    count, padding = max(found.get_vocab().values(), default=-1) + 1, padding_of(found, path)
    total = count if padding is not None and padding < count else count + 1
    if vocabulary not in (None, total):
        raise DataError(
            f"dataset.vocabulary is {vocabulary}, but {path} has {total} tokens, padding included: leave the option out"
        )
    # What the file says of lengths would cut texts without a word.
    found.no_padding()
    found.no_truncation()
    if length is not None:
        if length <= found.num_special_tokens_to_add(False):
            raise DataError(
                f"dataset.length is {length}, but {path} adds {found.num_special_tokens_to_add(False)} tokens to every "
                "text: raise it"
            )
        found.enable_truncation(length)  # which keeps the tokens that end a text
    encoded = found.encode_batch(texts)
    cut = sum(bool(one.overflowing) for one in encoded)
    return Tokenized([one.ids for one in encoded], total, count if padding is None else padding, cut)


def library_tokenizer(path: Path) -> Any:
    """A tokenizer of the library tokenizers, as its file has it.

    Args:
        path: its file, ``tokenizer.json``.

    Raises:
        DataError: there is no such file, the library is missing, or cannot read it.
    """
    if not path.is_file():
        raise DataError(
            f"dataset.tokenizer: {path} does not exist; it may be {', '.join((*_SPLITTERS, BYTES))}, or a "
            "tokenizer.json (or a folder with one)"
        )
    try:
        library = import_module("tokenizers")
    except ImportError:
        raise DataError(
            f"dataset.tokenizer: {path} needs the package tokenizers: pip install 'rayfl[hf]', or set it to words or "
            "characters"
        ) from None
    try:
        found = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(f"dataset.tokenizer: {path} is no tokenizer of the library tokenizers: {error}") from error
    return found


def padding_of(found: Any, path: Path) -> int | None:
    """The token that fills texts up, as the tokenizer or the file beside it has it; None where they have none."""
    if found.padding is not None:
        return int(found.padding["pad_id"])
    return named_token(found, path, "pad_token", _USUAL_PADDING)


def named_token(found: Any, path: Path, role: str, usual: Sequence[str]) -> int | None:
    """The token of a role that ``tokenizer_config.json`` beside a tokenizer names; without it one of a usual name.

    Args:
        found: the tokenizer.
        path: its file.
        role: such as ``eos_token``.
        usual: names that such tokens have.

    Raises:
        DataError: the file beside it cannot be read.
    """
    beside = path.with_name(SETTINGS)
    try:
        said = json.loads(beside.read_text(encoding="utf-8")).get(role) if beside.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"dataset.tokenizer: {beside} is not readable JSON: {error}") from error
    said = said.get("content") if isinstance(said, dict) else said
    names = (said,) if isinstance(said, str) else usual
    return next((token for name in names if (token := found.token_to_id(name)) is not None), None)
