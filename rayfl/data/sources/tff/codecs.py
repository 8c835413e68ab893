"""How the columns of each data set become the samples that TFF's own baselines train on."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.data.sources.leaf.codec import Part
from rayfl.data.sources.leaf.vectors import as_floats
from rayfl.data.sources.leaf.vocabulary import METADATA_KEY
from rayfl.data.sources.natural import NaturalHeader
from rayfl.data.sources.targets import next_tokens
from rayfl.data.sources.tff.reading import Columns
from rayfl.errors import DataError

IGNORED = -100
_PADDING = 0
_CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The alphabet of TFF's tutorial on text generation, which its baselines on Shakespeare have too."""

_FURTHER = 3
"""Unknown, begin and end, after the words."""

_MOST_TOKENS = 1 << 16  # tokens are stored as uint16
_BYTES = "latin-1"  # each byte is a character, as TFF takes them
_TOLERANCE = 1e-6


class TffCodec(ABC):
    """Looks at all clients if it has to (:attr:`surveys`), and then makes each one's samples.

    Attributes:
        surveys: whether :meth:`survey` wants to see all clients before :meth:`header` is asked for.
    """

    surveys = True

    def survey(self, columns: Columns, split: str, where: str) -> int:
        """Looks at a client and returns how many samples it will have."""
        return len(self.part(columns, where).y)

    @abstractmethod
    def header(self) -> NaturalHeader:
        """Returns what the samples are."""

    @abstractmethod
    def part(self, columns: Columns, where: str) -> Part:
        """A client's samples.

        Args:
            columns: by name, a value a sample.
            where: file and client, for errors.

        Raises:
            DataError: a value that this data set cannot have; names column, sample and fix.
        """

    def metadata(self) -> Mapping[bytes, bytes]:
        """More metadata for the file; here: none."""
        return {}


class Words(TffCodec):
    """Next words of Stack Overflow's sentences, as in TFF's baseline and Reddi et al. (2021).

    0 is padding; the V words of the vocabulary follow, then unknown, begin and end of a sentence: V + 4 tokens. Of a
    sentence the first ``length`` words count; begin stands before them, end after them where there is room.

    Args:
        words: the vocabulary, most frequent first; None: it is made of the training part.
        size: V, the most words there may be.
        length: T, positions of a sample.

    Raises:
        DataError: a size or length that cannot be.
    """

    def __init__(self, words: Sequence[str] | None, size: int, length: int) -> None:
        if not 1 <= size <= _MOST_TOKENS - 1 - _FURTHER:
            raise DataError(f"--vocabulary is {size}; it must be from 1 to {_MOST_TOKENS - 1 - _FURTHER}")
        if length < 1:
            raise DataError(f"--length is {length}; it must be at least 1")
        self.surveys = words is None
        self._users: Counter[str] = Counter()
        self._size, self._length = size, length
        self._words = None if words is None else tuple(words[:size])
        self._places: dict[str, int] = {}

    def survey(self, columns: Columns, split: str, where: str) -> int:
        sentences = _texts(columns, "tokens", where)
        if split == "train":
            self._users.update({word for sentence in sentences for word in sentence.split(" ")})
        return len(sentences)

    def header(self) -> NaturalHeader:
        if self._words is None:
            ranked = sorted((-users, word) for word, users in self._users.items())
            self._words = tuple(word for _, word in ranked[: self._size])
        self._places = {word: place for place, word in enumerate(self._words, start=1)}
        tokens = 1 + len(self._words) + _FURTHER
        return _text_header("stackoverflow", self._length, tokens)

    def part(self, columns: Columns, where: str) -> Part:
        sentences = _texts(columns, "tokens", where)
        unknown, begin, end = (len(self._places) + more for more in range(1, _FURTHER + 1))
        rows = np.full((len(sentences), self._length + 1), _PADDING, dtype=np.int64)
        for row, sentence in zip(rows, sentences, strict=True):
            tokens = [self._places.get(word, unknown) for word in sentence.split(" ")[: self._length]]
            tokens = [begin, *tokens, end][: self._length + 1]
            row[: len(tokens)] = tokens
        return _following(rows)

    def metadata(self) -> Mapping[bytes, bytes]:
        """The words in the order of their numbers, ``<PAD>`` first."""
        words = ["<PAD>", *(self._words or ()), "<UNK>", "<BOS>", "<EOS>"]
        return {METADATA_KEY: json.dumps(words, ensure_ascii=False).encode()}


class Characters(TffCodec):
    """Next characters of Shakespeare's snippets, as in TFF's baseline and Reddi et al. (2021).

    Begin, the characters and end of each snippet are filled up with padding (0) to a multiple of ``length`` + 1 and cut
    into rows of that length. 86 characters, unknown, begin and end: 90 tokens.

    Args:
        length: T, positions of a sample.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise DataError(f"--length is {length}; it must be at least 1")
        self._length = length
        self._places = {character: place for place, character in enumerate(_CHARACTERS, start=1)}

    def survey(self, columns: Columns, split: str, where: str) -> int:
        return sum(-(-(len(text) + 2) // (self._length + 1)) for text in _texts(columns, "snippets", where, _BYTES))

    def header(self) -> NaturalHeader:
        return _text_header("tff-shakespeare", self._length, 1 + len(_CHARACTERS) + _FURTHER)

    def part(self, columns: Columns, where: str) -> Part:
        unknown, begin, end = (len(_CHARACTERS) + more for more in range(1, _FURTHER + 1))
        rows = []
        for text in _texts(columns, "snippets", where, _BYTES):
            tokens = np.array([begin, *(self._places.get(character, unknown) for character in text), end])
            rows.append(np.pad(tokens, (0, -len(tokens) % (self._length + 1)), constant_values=_PADDING))
        return _following(np.concatenate([np.empty(0, dtype=np.int64), *rows]).reshape(-1, self._length + 1))


class GreyImages(TffCodec):
    """EMNIST's characters by writer: 28 x 28 pixels in [0, 1], where 1 is the paper.

    Stored as uint8 k where every pixel of the data set is k/255 within 1e-6, else as float32.

    Args:
        kind: what to call it.
        num_classes: 62, or 10 digits.
    """

    def __init__(self, kind: str, num_classes: int) -> None:
        self._kind, self._num_classes, self._exact = kind, num_classes, True

    def survey(self, columns: Columns, split: str, where: str) -> int:
        found = self._read(columns, where)
        self._exact &= found.x.dtype == np.uint8
        return len(found.y)

    def header(self) -> NaturalHeader:
        storage = "uint8" if self._exact else "float32"
        return NaturalHeader(
            kind=self._kind, input="image", shape=(1, 28, 28), num_classes=self._num_classes, storage=storage
        )

    def part(self, columns: Columns, where: str) -> Part:
        found = self._read(columns, where)
        return found if self._exact else Part(as_floats(found.x), found.y)

    def _read(self, columns: Columns, where: str) -> Part:
        y = _classes(columns, self._num_classes, where)
        pixels = _arrays(columns, "pixels", 28 * 28, len(y), where)
        outside = ~((pixels >= 0) & (pixels <= 1))  # NaN counts as outside
        if outside.any():
            sample, place = np.argwhere(outside)[0]
            raise DataError(
                f"{where}: column 'pixels', sample {sample}: {pixels[sample, place]} is not in [0, 1]; give TFF's file"
            )
        levels = np.rint(pixels * 255)
        exact = np.abs(pixels - levels / 255).max(initial=0) <= _TOLERANCE
        return Part(levels.astype(np.uint8) if exact else pixels.astype(np.float32), y)


class ColourImages(TffCodec):
    """CIFAR-100's photographs: 32 x 32 x 3 pixels from 0 to 255, and the fine label."""

    surveys = False

    def header(self) -> NaturalHeader:
        return NaturalHeader(kind="tff-cifar100", input="image", shape=(3, 32, 32), num_classes=100)

    def part(self, columns: Columns, where: str) -> Part:
        y = _classes(columns, 100, where)
        pixels = _arrays(columns, "image", 32 * 32 * 3, len(y), where)
        if ((pixels < 0) | (pixels > 255) | (pixels != np.rint(pixels))).any():
            raise DataError(f"{where}: column 'image' has values that are no integers from 0 to 255; give TFF's file")
        channels_first = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        return Part(channels_first.reshape(len(y), -1).astype(np.uint8), y)


def read_word_counts(path: Path) -> list[str]:
    """The words of TFF's file ``stackoverflow.word_count``: a word and a number a line, the most frequent first.

    Raises:
        DataError: the file cannot be read, or is another one.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; give TFF's stackoverflow.word_count") from error
    words: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        word, _, count = line.partition(" ")
        if not word or not count.strip().isdigit():
            raise DataError(
                f"{path}, line {number}: {line!r} is not a word, a blank and a number; give TFF's "
                "stackoverflow.word_count"
            )
        words.append(word)
    if len(set(words)) != len(words):
        twice = next(word for word, times in Counter(words).items() if times > 1)
        raise DataError(f"{path}: the word {twice!r} occurs twice; give TFF's stackoverflow.word_count")
    return words


def _text_header(kind: str, length: int, tokens: int) -> NaturalHeader:
    return NaturalHeader(
        kind=kind,
        input="tokens",
        shape=(length,),
        num_classes=tokens,
        vocabulary=tokens,
        storage="uint16",
        target="tokens",
        padding=_PADDING,
    )


def _following(rows: np.ndarray) -> Part:
    """Samples of rows of shape (n, T + 1): tokens, and the next one at each position, of which padding is ignored."""
    x, y = next_tokens(rows)
    return Part(x.astype(np.uint16), np.where(y == _PADDING, IGNORED, y).astype(np.int32))


def _texts(columns: Columns, column: str, where: str, encoding: str = "utf-8") -> list[str]:
    """The texts of a column, which are bytes (in TFF's own files ASCII)."""
    found = []
    for sample, value in enumerate(columns.get(column, ())):
        if not isinstance(value, bytes):
            raise DataError(f"{where}: column {column!r}, sample {sample} is no text; give the file of this data set")
        try:
            found.append(value.decode(encoding))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: column {column!r}, sample {sample} is not UTF-8: {error}") from error
    return found


def _arrays(columns: Columns, column: str, values: int, samples: int, where: str) -> np.ndarray:
    """float64 of shape (samples, values)."""
    given: Iterable[Any] = columns.get(column, ())
    rows = [np.asarray(row).reshape(-1) for row in given]
    for sample, row in enumerate(rows):
        if row.dtype.kind not in "iuf" or row.size != values:
            raise DataError(
                f"{where}: column {column!r}, sample {sample} has {row.size} values of the type {row.dtype}, not "
                f"{values} numbers; give the file of this data set"
            )
    return np.array(rows, dtype=np.float64).reshape(samples, values)


def _classes(columns: Columns, num_classes: int, where: str) -> np.ndarray:
    """Labels, int16 of shape (n,); the columns hold one each, of the shape () or (1,)."""
    found = [np.asarray(value).reshape(-1) for value in columns.get("label", ())]
    for sample, label in enumerate(found):
        if label.size != 1 or label.dtype.kind not in "iu" or not 0 <= label[0] < num_classes:
            raise DataError(
                f"{where}: column 'label', sample {sample} is {label.tolist()}, not a class from 0 to "
                f"{num_classes - 1}; give the file of this data set"
            )
    return np.array([label[0] for label in found], dtype=np.int16)
