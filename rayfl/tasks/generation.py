"""Answers of language models to prompts, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayfl.diagnosis.device_errors import Pieces
from rayfl.metrics.language import IGNORED
from rayfl.tasks.predictor import Model, Predictor

_ROWS = 1 << 14
"""Tokens of texts that are answered at the same time, with room for the answers."""


@dataclass(frozen=True)
class Prompt:
    """A text up to where a response begins, and that response.

    Attributes:
        tokens: of the text before it, at least one.
        response: tokens that the data set has there, with the one that ends it if the data have that.
    """

    tokens: tuple[int, ...]
    response: tuple[int, ...]


def prompts_of(x: Tensor, y: Tensor) -> list[Prompt]:
    """Returns the prompts of a text, one for each of its responses, after all that comes before it.

    Args:
        x: tokens, shape (T,).
        y: the next tokens where they are learned, else ``IGNORED``, shape (T,).
    """
    tokens, targets = x.tolist(), y.tolist()
    found, start = list[Prompt](), None
    for place, target in enumerate([*targets, IGNORED]):
        if target != IGNORED:
            start = place if start is None else start
        elif start is not None:
            found.append(Prompt(tuple(tokens[: start + 1]), tuple(targets[start:place])))
            start = None
    return found


def answers(
    predictor: Predictor,
    task: Any,
    prompts: Sequence[Prompt],
    most: int,
    length: int,
    end: int | None,
    device: torch.device,
) -> Iterator[list[int]]:
    """Generates the most probable next tokens, one after the other (greedy decoding), in the order of the prompts.

    A model has to be causal. One that reads texts piece by piece (``Network.reading``) reads each token once; others,
    and those whose predictions a method combines by itself, read the whole text for each token.

    Args:
        predictor: whose models are on ``device``.
        task: stands in for the predictor's where it has none.
        prompts: what is answered.
        most: tokens of an answer at most.
        length: tokens that the model can read; answers end where a text gets longer.
        end: the token that ends an answer, and is part of it; None: there is none.
        device: where the models compute.
    """
    models, together = predictor.built(), max(_ROWS // length, 1)
    pieces = Pieces("answers")
    for first in range(0, len(prompts), together):
        asked, found = prompts[first : first + together], list[list[int]]()

        def work(here: slice, asked: Sequence[Prompt] = asked, found: list[list[int]] = found) -> None:
            found.extend(_together(predictor, models, task, asked[here], most, length, end, device))

        pieces.over(len(asked), work)
        yield from found


def _together(
    predictor: Predictor,
    models: Sequence[Model],
    task: Any,
    prompts: Sequence[Prompt],
    most: int,
    length: int,
    end: int | None,
    device: torch.device,
) -> list[list[int]]:
    """Answers prompts in the same passes."""
    own = predictor.task or task
    if predictor.combine is None and own.network.reading is not None:
        texts: _Texts = _Read(own, models, prompts, device)
    else:
        texts = _ReadWhole(predictor, models, own, prompts, device)
    found: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        tokens = texts.next()
        for place, token in zip(active, tokens, strict=True):
            found[place].append(token)
        going = [at for at, place in enumerate(active) if not _over(found[place], prompts[place], most, length, end)]
        active = [active[at] for at in going]
        if active:
            texts.go_on([tokens[at] for at in going], going)
    return found


def _over(answer: Sequence[int], prompt: Prompt, most: int, length: int, end: int | None) -> bool:
    return answer[-1] == end or len(answer) >= most or len(prompt.tokens) + len(answer) > length


class _Texts(Protocol):
    """Texts that grow by the most probable tokens."""

    def next(self) -> list[int]:
        """Returns the most probable token after each text."""

    def go_on(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """Adds a token to each of some texts, and forgets the others.

        Args:
            tokens: one for each text that stays.
            kept: the places of these texts among those so far, in order.
        """


class _Read:
    """Texts of which each model reads every token once.

    Args:
        task: has the network.
        models: of a predictor without ``combine``.
        prompts: the beginnings of the texts.
        device: where the models compute.
    """

    def __init__(self, task: Any, models: Sequence[Model], prompts: Sequence[Prompt], device: torch.device) -> None:
        self._task, self._models = task, models
        self._reading = [task.network.reading(model) for model in models]
        lengths = torch.tensor([len(one.tokens) for one in prompts])
        longest = int(lengths.max())
        further = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for place, one in enumerate(prompts):
            further[place, longest - len(one.tokens) :] = torch.tensor(one.tokens)
        known = torch.arange(longest) >= longest - lengths[:, None]
        self._further, self._known, self._device = further.to(device), known.to(device), device

    @torch.no_grad()
    def next(self) -> list[int]:
        """See :class:`_Texts`."""
        read = [reading.read(self._further, self._known) for reading in self._reading]
        outputs = map(self._task.network.classify, self._models, read)
        members = [self._task.predicted(one) for one in outputs]
        found: list[int] = (members[0] if len(members) == 1 else self._task.mixed(members)).argmax(-1).tolist()
        return found

    def go_on(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """See :class:`_Texts`."""
        if len(kept) < len(self._further):
            places = torch.tensor(kept, device=self._device)
            for reading in self._reading:
                reading.keep(places)
        self._further = torch.tensor(tokens, device=self._device)[:, None]
        self._known = torch.ones_like(self._further, dtype=torch.bool)


class _ReadWhole:
    """Texts that are read from their beginnings for each token; they are filled up on the right.

    Args:
        predictor: makes predictions of models.
        models: its models.
        task: the predictor's, or what stands in for it.
        prompts: the beginnings of the texts.
        device: where the models compute.
    """

    def __init__(
        self, predictor: Predictor, models: Sequence[Model], task: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> None:
        self._predictor, self._models, self._task, self._device = predictor, models, task, device
        self._texts = [list(one.tokens) for one in prompts]
        self._starts = [len(one.tokens) - 1 for one in prompts]

    @torch.no_grad()
    def next(self) -> list[int]:
        """See :class:`_Texts`."""
        x = pad_sequence([torch.tensor(text) for text in self._texts], batch_first=True).to(self._device)
        rows = torch.arange(len(x), device=self._device)
        at = torch.tensor([len(text) - 1 for text in self._texts], device=self._device)
        asked = (
            torch.arange(x.shape[1], device=self._device) >= torch.tensor(self._starts, device=self._device)[:, None]
        )
        predicted = self._predictor.predictions(self._models, x, self._task, asked)[rows, at]
        found: list[int] = predicted.argmax(-1).tolist()
        return found

    def go_on(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """See :class:`_Texts`."""
        self._texts = [[*self._texts[place], token] for place, token in zip(kept, tokens, strict=True)]
        self._starts = [self._starts[place] for place in kept]
