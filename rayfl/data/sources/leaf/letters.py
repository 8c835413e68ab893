"""Shakespeare: windows of 80 characters of LEAF's alphabet, each with the character that follows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayfl.data.sources.leaf.codec import Codec, Part, Split, malformed
from rayfl.data.sources.natural import NaturalHeader

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80
NO_LETTER = 255
"""What :func:`letters` gives for a character that is not in the alphabet."""

SHAKESPEARE = NaturalHeader(
    kind="shakespeare", input="tokens", shape=(WINDOW,), num_classes=len(ALPHABET), vocabulary=len(ALPHABET)
)

_BEYOND = 127
_TOKEN_OF_CODE = np.full(_BEYOND + 1, NO_LETTER, dtype=np.uint8)
_TOKEN_OF_CODE[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))


def letters(text: str) -> np.ndarray:
    """Each character's place in ``ALPHABET``, uint8 of shape (len(text),); ``NO_LETTER`` for all others."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    # The alphabet is ASCII: 127 (delete, no letter of it) stands for everything beyond.
    return np.asarray(_TOKEN_OF_CODE[np.minimum(codes, _BEYOND)])


class ShakespeareCodec(Codec):
    """x: a text of 80 characters; y: one character."""

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        return Part(_tokens(x, WINDOW, "x", where), _tokens(y, 1, "y", where)[:, 0].astype(np.int16))

    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        return SHAKESPEARE


def _tokens(texts: list[object], length: int, key: str, where: str) -> np.ndarray:
    for sample, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            raise malformed(where, f"{key}[{sample}] is not a string of {length} characters")
    joined = "".join(map(str, texts))
    tokens = letters(joined)
    unknown = np.flatnonzero(tokens == NO_LETTER)
    if unknown.size:
        place = int(unknown[0])
        raise malformed(where, f"{key}[{place // length}] has {joined[place]!r}, which is not in LEAF's alphabet")
    return tokens.reshape(len(texts), length)
