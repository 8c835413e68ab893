"""Which number stands for which word."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfl.data.sources.leaf.codec import Split
from rayfl.errors import DataError

PADDING, UNKNOWN = 0, 1
SPECIAL = ("<PAD>", "<UNK>")
METADATA_KEY = b"rayfl.vocabulary"
"""Where an imported file's metadata have the words, as a JSON list in the order of their numbers."""

_LARGEST_FILE = 16 << 20


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their numbers; 0 is padding and 1 stands for every word that is not among them.

    Attributes:
        words: the words, ``<PAD>`` and ``<UNK>`` first.
    """

    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of_counts(cls, counts: Mapping[str, int], size: int) -> Vocabulary:
        """The most frequent words, ties in alphabetical order, as LEAF orders Reddit's.

        Args:
            counts: how often each word occurs.
            size: the most words there may be, padding and unknown included.
        """
        ranked = sorted((-count, word) for word, count in counts.items() if count and word not in SPECIAL)
        return cls((*SPECIAL, *(word for _, word in ranked[: size - len(SPECIAL)])))

    @classmethod
    def of_file(cls, path: Path, limit: int) -> Vocabulary:
        """The words of a text file in UTF-8, one a line, ``<PAD>`` and ``<UNK>`` first.

        Raises:
            DataError: the file cannot be read, is not such a list, or has more words than ``limit``.
        """
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise DataError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB; give a list of words, one a line")
            words = path.read_bytes().decode("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as text: {error}; give a list of words, one a line") from error
        # Not splitlines(), which would cut words at more than line feeds.
        words = [word.removesuffix("\r") for word in words]
        if words[-1] == "":
            words.pop()
        if tuple(words[:2]) != SPECIAL:
            raise DataError(f"{path}: the first two lines must be {SPECIAL[0]} and {SPECIAL[1]}; put them there")
        if len(words) > limit:
            raise DataError(f"{path}: {len(words)} words are more than the {limit} that can be stored; shorten it")
        places: dict[str, int] = {}
        for line, word in enumerate(words, start=1):
            if not word or word in places:
                problem = f"repeats line {places[word]}" if word else "is empty"
                raise DataError(f"{path}: line {line} {problem}; every line must be a word of its own")
            places[word] = line
        return cls(tuple(words))

    def metadata(self) -> dict[bytes, bytes]:
        """The words, for an imported file's metadata."""
        return {METADATA_KEY: json.dumps(self.words, ensure_ascii=False).encode()}


class WordCounter:
    """Gives every new word a number of its own, and counts those of the train part.

    The numbers are only good until the vocabulary is known: padding is 0, the others follow in order of appearance.
    """

    def __init__(self) -> None:
        self._numbers = {word: number for number, word in enumerate(SPECIAL)}
        self._counts = [0, 0]

    def numbers(self, words: Iterable[str], split: Split) -> list[int]:
        """The words' numbers; they are counted if ``split`` is ``train``."""
        result = []
        for word in words:
            number = self._numbers.setdefault(word, len(self._counts))
            if number == len(self._counts):
                self._counts.append(0)
            if split == "train":
                self._counts[number] += 1
            result.append(number)
        return result

    def counts(self) -> dict[str, int]:
        """Returns how often each word occurs in the train part."""
        return dict(zip(self._numbers, self._counts, strict=True))

    def places(self, vocabulary: Vocabulary) -> np.ndarray:
        """For every number given so far, the word's place in the vocabulary; int64."""
        known = {word: place for place, word in enumerate(vocabulary.words)}
        return np.array([known.get(word, UNKNOWN) for word in self._numbers], dtype=np.int64)
