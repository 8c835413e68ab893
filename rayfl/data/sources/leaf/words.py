"""Data sets of words: the tweets of Sent140, and Reddit's comments."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rayfl.data.sources.leaf.codec import Codec, Part, Split, labels, malformed
from rayfl.data.sources.leaf.vocabulary import PADDING, SPECIAL, Vocabulary, WordCounter
from rayfl.data.sources.natural import NaturalHeader
from rayfl.errors import DataError

DEFAULT_VOCABULARY = 10_000
REDDIT_LENGTH = 10
TokenKind = Literal["words", "characters"]

_MOST_TOKENS = 1 << 16  # tokens are stored as uint16
_MOST_LABELS = 1 << 15  # labels are stored as int16
_LONGEST = 10_000
_IGNORED = -100
_DEFAULT_LENGTH: dict[TokenKind, int] = {"words": 25, "characters": 140}
# As LEAF cuts tweets: words with their apostrophes, and the marks that end clauses.
_WORD = re.compile(r"[\w']+|[.,!?;]")
_TEXT_FIELD = 4
_POSITIVE = 4


@dataclass(frozen=True)
class VocabularyChoice:
    """Where the vocabulary comes from.

    Attributes:
        size: the most words of a vocabulary that is built from the train part; padding and unknown count.
        file: a list of words to take instead.
    """

    size: int = DEFAULT_VOCABULARY
    file: Path | None = None


class _WordCodec(Codec):
    """Numbers words as they come, and turns these numbers into places in the vocabulary once that is known."""

    def __init__(self, choice: VocabularyChoice, limit: int) -> None:
        if not len(SPECIAL) < choice.size <= limit:
            raise DataError(f"--vocabulary is {choice.size}; it must be from {len(SPECIAL) + 1} to {limit}")
        self.counter = WordCounter()
        self._choice = choice
        self._vocabulary = Vocabulary.of_file(choice.file, limit) if choice.file else None
        self._places = np.empty(0, dtype=np.int64)

    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of_counts(self.counter.counts(), self._choice.size)
        self._places = self.counter.places(self._vocabulary)
        return self._described(len(self._vocabulary))

    def stored(self, part: Part, header: NaturalHeader) -> Part:
        return Part(self._places[part.x].astype(np.uint16), self._stored_labels(part.y))

    def metadata(self) -> Mapping[bytes, bytes]:
        return {} if self._vocabulary is None else self._vocabulary.metadata()

    @abstractmethod
    def _described(self, vocabulary: int) -> NaturalHeader:
        """The header for a vocabulary of this many words."""

    def _stored_labels(self, y: np.ndarray) -> np.ndarray:
        return y


class Sent140Codec(_WordCodec):
    """x: LEAF's fields of a tweet, of which the one at index 4 is the text; y: 0, or 1 or 4 for a positive one.

    A text is cut into words (runs of letters, digits, underscores and apostrophes, and each of ``.,!?;``; the case
    of letters is kept, all else is dropped) or into characters. The first ``length`` of them are kept, and shorter
    texts are padded at their ends, as LEAF does.

    Args:
        choice: where the vocabulary comes from.
        tokens: what a text is cut into.
        length: tokens in one input; None: 25 words, or 140 characters.

    Raises:
        DataError: an unusable vocabulary or length.
    """

    def __init__(self, choice: VocabularyChoice, tokens: TokenKind = "words", length: int | None = None) -> None:
        super().__init__(choice, _MOST_TOKENS)
        self._tokens: TokenKind = tokens
        self._length = _DEFAULT_LENGTH[tokens] if length is None else length
        if not 1 <= self._length <= _LONGEST:
            raise DataError(f"--length is {self._length}; it must be from 1 to {_LONGEST}")

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        tokens = np.full((len(x), self._length), PADDING, dtype=np.int32)
        for sample, fields in enumerate(x):
            # LEAF writes id, date, query, user and text; some forks append a field.
            if not isinstance(fields, list) or len(fields) not in (_TEXT_FIELD + 1, _TEXT_FIELD + 2):
                raise malformed(where, f"x[{sample}] is not a list of LEAF's 5 fields (id, date, query, user, text)")
            text = fields[_TEXT_FIELD]
            if not isinstance(text, str):
                raise malformed(where, f"x[{sample}][{_TEXT_FIELD}] is not a text")
            _check_text(text, f"x[{sample}][{_TEXT_FIELD}]", where)
            cut = _WORD.findall(text) if self._tokens == "words" else list(text)
            numbers = self.counter.numbers(cut[: self._length], split)
            tokens[sample, : len(numbers)] = numbers
        return Part(tokens, labels([_polarity(label) for label in y], 2, where))

    def _described(self, vocabulary: int) -> NaturalHeader:
        return NaturalHeader(
            kind="sent140",
            input="tokens",
            shape=(self._length,),
            num_classes=2,
            vocabulary=vocabulary,
            storage="uint16",
        )


class RedditCodec(_WordCodec):
    """x: comments, each of sequences of 10 words; y: for each comment the sequences of the words to predict.

    Every place whose next word is not padding becomes one sample: the words of its sequence up to there, padded at
    their beginning to 10, and the next word as label. LEAF predicts the same words, with one pass over the sequence.

    With ``sequences`` a sample is a sequence, of which every next word is learned but padding, as in LEAF's own pass.

    Args:
        choice: where the vocabulary comes from.
        sequences: whether a sample is a whole sequence.

    Raises:
        DataError: an unusable vocabulary.
    """

    def __init__(self, choice: VocabularyChoice, sequences: bool = False) -> None:
        super().__init__(choice, _MOST_TOKENS if sequences else _MOST_LABELS)
        self._sequences = sequences

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        inputs: list[list[int]] = []
        targets: list[list[int]] = []
        for sample, (comment, label) in enumerate(zip(x, y, strict=True)):
            asked = label.get("target_tokens") if isinstance(label, dict) else label
            said = _sequences(comment, f"x[{sample}]", where)
            following = _sequences(asked, f"the target_tokens of y[{sample}]", where)
            if len(said) != len(following):
                problem = f"x[{sample}] has {len(said)} sequences and the target_tokens of y[{sample}] {len(following)}"
                raise malformed(where, problem)
            inputs += [self.counter.numbers(sequence, split) for sequence in said]
            # Counted once only: a target is the next input.
            targets += [self.counter.numbers(sequence, "test") for sequence in following]
        return _sequences_of(inputs, targets) if self._sequences else _next_words(inputs, targets)

    def _described(self, vocabulary: int) -> NaturalHeader:
        return NaturalHeader(
            kind="reddit",
            input="tokens",
            shape=(REDDIT_LENGTH,),
            num_classes=vocabulary,
            vocabulary=vocabulary,
            storage="uint16",
            target="tokens" if self._sequences else "class",
            padding=PADDING if self._sequences else None,
        )

    def _stored_labels(self, y: np.ndarray) -> np.ndarray:
        if self._sequences:
            return np.where(y == PADDING, _IGNORED, self._places[y]).astype(np.int32)
        return np.asarray(self._places[y], dtype=np.int16)


def _polarity(label: object) -> object:
    """LEAF's 1 for the 4 of the original file; everything else as it is."""
    return 1 if type(label) is int and label == _POSITIVE else label


def _sequences(value: object, name: str, where: str) -> list[list[str]]:
    if not isinstance(value, list):
        raise malformed(where, f"{name} is not a list of sequences of words")
    for sequence in value:
        if (
            not isinstance(sequence, list)
            or len(sequence) != REDDIT_LENGTH
            or not all(isinstance(word, str) for word in sequence)
        ):
            raise malformed(where, f"{name} has a sequence that is not a list of {REDDIT_LENGTH} words")
        for word in sequence:
            _check_text(word, name, where)
    return value


def _check_text(text: str, name: str, where: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise malformed(where, f"{name} holds half a surrogate pair")


def _sequences_of(inputs: list[list[int]], targets: list[list[int]]) -> Part:
    words, following = (np.array(rows, dtype=np.int32).reshape(len(rows), REDDIT_LENGTH) for rows in (inputs, targets))
    return Part(words, following)


def _next_words(inputs: list[list[int]], targets: list[list[int]]) -> Part:
    sequences = _sequences_of(inputs, targets)
    words, following = sequences.x, sequences.y
    padded = np.pad(words, ((0, 0), (REDDIT_LENGTH - 1, 0)), constant_values=PADDING)
    asked = following != PADDING
    return Part(sliding_window_view(padded, REDDIT_LENGTH, axis=1)[asked], following[asked])
