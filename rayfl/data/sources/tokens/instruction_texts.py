"""Prompts made of the columns of a row, and their responses, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from string import Formatter
from typing import Any, Protocol

import numpy as np

from rayfl.data.sources.tokens.tokenizers import (
    BYTES,
    PADDING,
    library_tokenizer,
    named_token,
    padding_of,
    tokenizer_file,
)
from rayfl.errors import DataError
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, byte_tokens, text_of_bytes

_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>")


@dataclass(frozen=True)
class Template:
    """A prompt with names of columns in braces.

    Attributes:
        text: for rows that have all of them.
        without: what stands for it where a row's value of ``optional`` is empty or missing; None: that is an error.
        optional: a column that rows may lack.
    """

    text: str
    without: str | None = None
    optional: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns which columns it names, each once."""
        return tuple(dict.fromkeys(name for _, name, _, _ in Formatter().parse(self.text) if name is not None))

    def prompt(self, row: Mapping[str, str | None]) -> str:
        """A row's prompt; ``row`` has a text for each column, or none for the optional one."""
        text = self.text if self.without is None or row.get(self.optional) else self.without
        parts = Formatter().parse(text)
        return "".join(before + ("" if name is None else row[name] or "") for before, name, _, _ in parts)


TEMPLATES = {
    "alpaca": Template(
        f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n### Instruction:\n{{instruction}}"
        "\n\n### Input:\n{input}\n\n### Response:\n",
        f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
        "input",
    ),
    "flowertune": Template(f"{_TASK}. {_REQUEST}\n### Instruction:\n{{instruction}}\n### Response:"),
}
"""By name: Stanford Alpaca's (Taori et al., 2023), and that of Flower's FlowerTune, which leaves the input out."""


def template_of(name: str) -> Template:
    """The template of a name of :data:`TEMPLATES`, or one that is written out.

    Raises:
        ValueError: it is neither, or its braces are not names of columns.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        fields = [(field, given, how) for _, field, given, how in Formatter().parse(name) if field is not None]
    except ValueError as error:
        raise ValueError(f"template {name!r}: {error}") from error
    if not fields:
        known = ", ".join(TEMPLATES)
        raise ValueError(f"template {name!r} names no column in braces, and is none of {known}")
    if any(not field or given or how for field, given, how in fields):
        raise ValueError(f"template {name!r}: needed are names of columns in braces, and nothing else in them")
    return Template(name)


class Encoder(Protocol):
    """Makes tokens of prompts and responses, each apart, or of whole texts.

    Attributes:
        vocabulary: how many tokens there are.
        padding: the one that fills rows up.
        end: the one that ends a response; None: none does.
        puts_blanks: whether a blank is put before every text.
    """

    vocabulary: int
    padding: int
    end: int | None
    puts_blanks: bool

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts, with those that begin a text."""
        ...

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of responses, without those that begin or end a text."""
        ...

    def pieces(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """The tokens of whole texts that are given in pieces, by piece; every second piece is learned.

        A token of both sides of a border counts to the piece that is learned.
        """
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...


class _Bytes:
    """The bytes of UTF-8."""

    vocabulary, padding, puts_blanks = BYTE_TOKENS, PADDING, False

    def __init__(self, end: int | None) -> None:
        self.end = end

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [byte_tokens(text) for text in texts]

    responses = prompts

    def pieces(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        return [self.prompts(pieces) for pieces in texts]

    def text(self, tokens: Sequence[int]) -> str:
        return text_of_bytes(tokens)


class _Library:
    """A tokenizer of the library tokenizers.

    What it puts before a text is kept before prompts, and what it puts behind one is not: responses follow. Where
    nothing is there to fill rows up the token that ends responses does: it is never read as one there.
    """

    def __init__(self, found: Any, path: Path, end: int | None) -> None:
        padding = padding_of(found, path)
        found.no_padding()
        found.no_truncation()
        self.vocabulary = max(found.get_vocab().values(), default=-1) + 1
        self.end = end
        self.padding = next(token for token in (padding, end, 0) if token is not None)
        self.puts_blanks = found.encode("a", add_special_tokens=False).tokens[:1] != ["a"]
        self._tokenizer = found

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [_without_ending(one) for one in self._tokenizer.encode_batch(list(texts))]

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def pieces(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        # Some tokenizers say of blanks that they are nowhere in a text. This processor leaves places as they are.
        whole = type(self._tokenizer).from_str(self._tokenizer.to_str())
        whole.post_processor = import_module("tokenizers").processors.ByteLevel(trim_offsets=False)
        found = whole.encode_batch(["".join(pieces) for pieces in texts], add_special_tokens=False)
        return [_in_pieces(one, pieces) for one, pieces in zip(found, texts, strict=True)]

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(tokens))
        return found


def _in_pieces(found: Any, pieces: Sequence[str]) -> list[list[int]]:
    """The tokens of a text by piece."""
    places = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.cumsum([len(piece) for piece in pieces])
    borders = [0]
    for number in range(1, len(pieces), 2):
        start, stop, before = ends[number - 1], ends[number], borders[-1]
        own = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < stop))
        borders += [max(int(own[0]), before), int(own[-1]) + 1] if len(own) and start < stop else [before, before]
    borders[-1] = len(places)
    return [found.ids[start:stop] for start, stop in pairwise(borders)]


def _without_ending(found: Any) -> list[int]:
    """The tokens of a text without the special ones behind its own."""
    last = max((place for place, special in enumerate(found.special_tokens_mask) if not special), default=-1)
    ids: list[int] = found.ids
    return ids[: last + 1]


def encoder_of(tokenizer: str, end: str) -> Encoder:
    """What makes tokens of prompts and responses.

    Args:
        tokenizer: ``bytes``, or a ``tokenizer.json`` of the library tokenizers, or a folder with one.
        end: ``auto``: the tokenizer's own token that ends a text; ``none``; or that token.

    Raises:
        DataError: the tokenizer cannot be read, or has no such token.
    """
    if tokenizer == BYTES:
        if end not in ("auto", "none"):
            raise DataError(f"dataset.end is {end!r}, but tokenizer={BYTES} has one token for it: set auto or none")
        return _Bytes(END_OF_BYTES if end == "auto" else None)
    path = tokenizer_file(tokenizer)
    if path is None:
        raise DataError(
            f"dataset.tokenizer is {tokenizer!r}, but instructions are for models that are there already: give their "
            f"tokenizer.json, or a folder with it, or {BYTES}"
        )
    found = library_tokenizer(path)
    if end == "none":
        return _Library(found, path, None)
    token = named_token(found, path, "eos_token", _ENDS) if end == "auto" else found.token_to_id(end)
    if token is None:
        what = "says nowhere which token ends a text" if end == "auto" else f"has no token {end!r}"
        raise DataError(f"dataset.end: {path} {what}: name that token, or set it to none")
    return _Library(found, path, token)


def begins_with_blank(prompt: str, encoder: Encoder) -> bool:
    """Returns whether a blank belongs before the response: where the prompt does not end in one, or in a line's end.

    Tokenizers that put one before every text do so by themselves.
    """
    return bool(prompt) and not prompt[-1].isspace() and not encoder.puts_blanks
