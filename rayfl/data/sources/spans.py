"""Texts in pieces as rows of tokens, and the next tokens where they are learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rayfl.data.sources.columns import Rows
from rayfl.data.sources.instruction_texts import Encoder, begins_with_blank
from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED

Pieces = Sequence[Sequence[str]]
"""By row, a piece that is read, one that is learned, one that is read, and so on."""


def tokens_of_responses(rows: Pieces, encoder: Encoder) -> list[list[list[int]]]:
    """The tokens of prompts and responses, each apart; the response ends with the token for it."""
    prompts, responses = ([row[place] for row in rows] for place in (0, 1))
    before = encoder.prompts(prompts)
    blanks = [" " if begins_with_blank(prompt, encoder) else "" for prompt in prompts]
    after = encoder.responses([blank + response for blank, response in zip(blanks, responses, strict=True)])
    ending = [] if encoder.end is None else [encoder.end]
    return [[first, [*second, *ending]] for first, second in zip(before, after, strict=True)]


def tokens_of_turns(rows: Pieces, encoder: Encoder) -> list[list[list[int]]]:
    """The tokens of conversations, by piece; their template has written what begins and ends a turn."""
    ending = [] if encoder.end is None else [encoder.end]
    return [[*pieces[:-1], [*pieces[-1], *ending]] for pieces in encoder.pieces(rows)]


def rows_of(
    pieces: Sequence[Sequence[Sequence[int]]],
    clients: np.ndarray | None,
    splits: np.ndarray | None,
    encoder: Encoder,
    length: int | None,
    files: Sequence[Path],
) -> Rows:
    """Rows of tokens, and the next tokens at the positions of those that are learned.

    Args:
        pieces: tokens by row and piece, every second one of which is learned.
        clients: a name by row.
        splits: by row.
        encoder: what has made the tokens.
        length: how many are read of a row; None: those of the longest.
        files: for messages.

    Raises:
        DataError: nothing is learned.
    """
    whole = [[token for piece in row for token in piece] for row in pieces]
    width = length or max(max(map(len, whole)) - 1, 1)
    tokens = np.full((len(whole), width + 1), encoder.padding, dtype=np.int32)
    learned = np.zeros((len(whole), width + 1), dtype=bool)
    for place, row in enumerate(whole):
        marks = [bool(number % 2) for number, piece in enumerate(pieces[place]) for _ in piece]
        tokens[place, : len(row)] = row[: width + 1]
        learned[place, : len(row)] = marks[: width + 1]
    asked = learned[:, 1:]
    kept = np.flatnonzero(asked.any(1))
    if not kept.size:
        raise DataError(
            f"{', '.join(map(str, files))}: no response has a token within {width} tokens: raise dataset.length, or "
            "name the columns of prompts and responses"
        )
    cut = int((np.array([len(whole[row]) for row in kept]) > width + 1).sum())
    return Rows(
        tokens[kept, :-1],
        np.where(asked, tokens[:, 1:], IGNORED)[kept],
        None if clients is None else clients[kept],
        None if splits is None else splits[kept],
        integers=False,
        num_labels=0,
        vocabulary=encoder.vocabulary,
        cut=cut,
        padding=encoder.padding,
        left_out=len(whole) - len(kept),
    )
