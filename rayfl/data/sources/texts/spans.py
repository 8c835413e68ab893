"""Texts in pieces as rows of tokens, and the next tokens where they are learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.tokens.instruction_texts import Encoder, begins_with_blank
from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED

Pieces = Sequence[Sequence[str]]
"""By row, a piece that is read, one that is learned, one that is read, and so on."""


def tokens_of_responses(rows: Pieces, encoder: Encoder, own_blanks: bool = False) -> list[list[list[int]]]:
    """The tokens of prompts and responses, each apart; the response ends with the token for it.

    Args:
        rows: prompt and response each.
        encoder: makes the tokens.
        own_blanks: whether responses may begin with a blank themselves, which then is the only one.
    """
    prompts, responses = ([row[place] for row in rows] for place in (0, 1))
    before = encoder.prompts(prompts)
    if own_blanks:
        responses = [
            text[1:] if text[:1] == " " and not prompt[-1:].isspace() else text
            for prompt, text in zip(prompts, responses, strict=True)
        ]
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
    answers: int = 1,
) -> Rows:
    """Rows of tokens, and the next tokens at the positions of those that are learned.

    Args:
        pieces: tokens by text and piece, every second one of which is learned.
        clients: a name by row.
        splits: by row.
        encoder: what has made the tokens.
        length: how many are read of a row; None: those of the longest.
        files: for messages.
        answers: how many texts a row has, one after the other: the rows of several are of shape (answers, T), and those
            without a token to learn in one of them, or with equal texts, are left out.

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
    shape = (-1, width + 1) if answers == 1 else (-1, answers, width + 1)
    tokens, learned = tokens.reshape(shape), learned.reshape(shape)
    asked = learned[..., 1:]
    fitting = asked.any(-1) if answers == 1 else asked.any(-1).all(-1)
    alike = np.zeros(len(tokens), dtype=bool)
    if answers > 1:
        alike = fitting & (np.where(learned, tokens, IGNORED) == np.where(learned, tokens, IGNORED)[:, :1]).all((1, 2))
    kept = np.flatnonzero(fitting & ~alike)
    if not kept.size:
        raise DataError(
            f"{', '.join(map(str, files))}: no response has a token within {width} tokens"
            + (" that another response to the prompt has not" if alike.any() else "")
            + ": raise dataset.length, or name the columns of prompts and responses"
        )
    lengths = np.array([len(row) for row in whole]).reshape(-1, answers)
    return Rows(
        tokens[kept, ..., :-1],
        np.where(asked, tokens[..., 1:], IGNORED)[kept],
        None if clients is None else clients[kept],
        None if splits is None else splits[kept],
        integers=False,
        num_labels=0,
        vocabulary=encoder.vocabulary,
        cut=int((lengths[kept] > width + 1).any(1).sum()),
        padding=encoder.padding,
        left_out=int((~fitting).sum()),
        alike=int(alike.sum()),
    )
