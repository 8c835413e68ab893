"""The classes' texts as tokens, with room for a context."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayfl.errors import ModelError
from rayfl.models.pretrained.loading import quiet
from rayfl.models.pretrained.prompt_section import PLACE, PromptConfig

_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
"""Of which one group must be there."""

_ROOM = -1
"""Stands for a context vector among tokens."""

_HIGHEST_ENDS = 2
"""The ``eos_token_id`` of CLIP's older configurations, which is not their tokenizers': texts end with the highest
token there. transformers knows this exception by the same number."""


@dataclass(frozen=True)
class ClassTexts:
    """Texts of C classes, filled up to T tokens on the right.

    Attributes:
        tokens: int64 of shape (C, T); 0 where context vectors are, and where a text is filled up.
        ends: where the token is at which a text is read, int64 of shape (C,).
        first: the place of the first context vector.
        length: how many context vectors there are; 0 for none.
        words: the tokens of the template's words before the name.
        names: the classes' names without a template, as tokens (C, T') and as where they are read, (C,).
        sha256: checksum of the tokens of the whole texts.
    """

    tokens: Tensor
    ends: Tensor
    first: int
    length: int
    words: tuple[int, ...]
    names: tuple[Tensor, Tensor]
    sha256: str

    @property
    def of_template(self) -> tuple[Tensor, Tensor]:
        """Tokens and ends of the template's texts, as ``tokens`` and ``ends``, with its words in a context's place."""
        front, back = self.tokens[:, : self.first], self.tokens[:, self.first + self.length :]
        words = torch.tensor(self.words, dtype=torch.int64).expand(len(self.tokens), -1)
        return torch.cat([front, words, back], 1), self.ends + len(self.words) - self.length


def class_texts(prompt: PromptConfig, folder: Path) -> ClassTexts:
    """Makes tokens of the classes' texts.

    Args:
        prompt: the section ``model.prompt``, with names of classes.
        folder: has the base's configuration and its tokenizer.

    Raises:
        ModelError: there is no tokenizer, texts are too long or the same, or are not cut where a context is to be put.
    """
    assert prompt.classes is not None
    with quiet() as transformers:
        text_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).text_config
    tokens_of = _tokenizer(folder)
    whole = [tokens_of(prompt.text_of(name), True) for name in prompt.classes]
    rows, words, first = whole, list[int](), 0
    if prompt.context != "none":
        first, words, behind = _cut(prompt, tokens_of, whole)
        length = len(words) if prompt.drawn is None else prompt.drawn
        if not length:
            raise ModelError("model.prompt.start=template: the template's words before the name have no tokens")
        rows = [row[:first] + [_ROOM] * length + rest for row, rest in zip(whole, behind, strict=True)]
    else:
        length = 0
    _check(prompt, rows, whole, text_config)
    tokens, ends = _filled(rows, text_config.eos_token_id)
    names = _filled([tokens_of(prompt.spoken(name), True) for name in prompt.classes], text_config.eos_token_id)
    digest = hashlib.sha256(json.dumps([whole, first, words]).encode()).hexdigest()
    return ClassTexts(tokens, ends, first, length, tuple(words), names, digest)


def _filled(rows: Sequence[Sequence[int]], eos_token_id: int) -> tuple[Tensor, Tensor]:
    """Texts filled up on the right, and where they are read."""
    longest = max(map(len, rows))
    filled = torch.tensor([[*(max(token, 0) for token in row), *[0] * (longest - len(row))] for row in rows])
    return filled, torch.tensor([_end(row, eos_token_id) for row in rows])


def _tokenizer(folder: Path) -> Callable[[str, bool], list[int]]:
    """A function of a text, and of whether it gets the tokens that begin and end texts."""
    try:
        # Without files transformers makes a tokenizer that knows no words.
        if not any(all((folder / name).is_file() for name in names) for names in _FILES):
            raise FileNotFoundError(" or ".join(" and ".join(names) for names in _FILES))
        with quiet() as transformers:
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the readers of the many kinds of files raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model.folder: {folder} has no tokenizer that can be read ({reason}): save the base's own there, with "
            "`save_pretrained` of transformers"
        ) from error
    return lambda text, ends: list(found(text, add_special_tokens=ends)["input_ids"])


def _cut(
    prompt: PromptConfig, tokens_of: Callable[[str, bool], list[int]], whole: Sequence[list[int]]
) -> tuple[int, list[int], list[list[int]]]:
    """Where the words before the names begin, their tokens, and what comes after them in each text, to its end.

    Raises:
        ModelError: a token has parts of both.
    """
    before = prompt.template.partition(PLACE)[0]
    assert prompt.classes is not None
    # Blanks between words belong to the token before them, to the one behind them, or to none.
    words = [tokens_of(before, False), tokens_of(before.rstrip(), False)]
    for candidate in words:
        places = []
        for name, row in zip(prompt.classes, whole, strict=True):
            inner = tokens_of(prompt.text_of(name), False)
            first = next((n for n in range(len(row)) if row[n : n + len(inner)] == inner), None)
            if first is None or inner[: len(candidate)] != candidate or len(inner) == len(candidate):
                break
            places.append(first)
        else:
            if len(set(places)) == 1:
                first = places[0]
                return first, candidate, [row[first + len(candidate) :] for row in whole]
    raise ModelError(
        f"model.prompt.template: the tokenizer does not part the words before {PLACE} from the name in "
        f"{prompt.text_of(prompt.classes[0])!r}: put a blank there, or set model.prompt.context=none"
    )


def _check(
    prompt: PromptConfig, rows: Sequence[Sequence[int]], whole: Sequence[Sequence[int]], text_config: Any
) -> None:
    """Refuses texts that the text tower cannot read, or cannot tell apart."""
    assert prompt.classes is not None
    most, known = int(text_config.max_position_embeddings), int(text_config.vocab_size)
    for number, (name, row) in enumerate(zip(prompt.classes, rows, strict=True)):
        if len(row) > most:
            shorter = ", or a smaller model.prompt.length" if prompt.drawn else ""
            raise ModelError(
                f"model.prompt: the text of {name!r} has {len(row)} tokens, and the base reads at most {most}: choose "
                f"shorter names or a shorter template{shorter}"
            )
        if max(row) >= known:
            raise ModelError(
                f"model.folder: the tokenizer makes the token {max(row)} of {name!r}, and the base knows {known}: save "
                "the base's own tokenizer there"
            )
        if text_config.eos_token_id != _HIGHEST_ENDS and text_config.eos_token_id not in row:
            raise ModelError(
                f"model.folder: the tokenizer does not end texts with the token {text_config.eos_token_id}, at which "
                "the base reads them (eos_token_id of text_config): save the base's own tokenizer there"
            )
        if (same := list(whole).index(whole[number])) < number:
            raise ModelError(
                f"model.prompt.classes: {prompt.classes[same]!r} and {name!r} are the same tokens to the base: choose "
                "names that its tokenizer knows"
            )


def _end(row: Sequence[int], token: int) -> int:
    """Where a text is read: at the first token that ends texts."""
    return row.index(max(row) if token == _HIGHEST_ENDS else token)
