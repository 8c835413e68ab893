"""Answers of language models to prompts, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.predictor import Model, Predictor
from rayfl.metrics.language import IGNORED

_ROWS = 1 << 14
"""Positions of a pass."""


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

    A model reads the whole text for each token: it has to be causal, and needs nothing else of its network.

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
    for first in range(0, len(prompts), together):
        yield from _together(predictor, models, task, prompts[first : first + together], most, length, end, device)


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
    begins = [len(one.tokens) for one in prompts]
    x = torch.zeros(len(prompts), min(max(begins) + most, length), dtype=torch.int64)
    for place, one in enumerate(prompts):
        x[place, : begins[place]] = torch.tensor(one.tokens)
    found: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        last = [begins[place] + len(found[place]) - 1 for place in active]
        given = x[active, : max(last) + 1].to(device)
        starts = torch.tensor([begins[place] - 1 for place in active], device=device)
        for place, token in zip(active, _next(predictor, models, task, given, last, starts), strict=True):
            found[place].append(token)
            if (at := begins[place] + len(found[place]) - 1) < x.shape[1]:
                x[place, at] = token
        active = [place for place in active if not _over(found[place], begins[place], most, length, end)]
    return found


def _over(answer: Sequence[int], begin: int, most: int, length: int, end: int | None) -> bool:
    return answer[-1] == end or len(answer) >= most or begin + len(answer) > length


@torch.no_grad()
def _next(
    predictor: Predictor, models: Sequence[Model], task: Any, x: Tensor, last: Sequence[int], starts: Tensor
) -> list[int]:
    """Returns the most probable token after the last one of each text.

    Args:
        predictor: see :func:`answers`.
        models: its models.
        task: see :func:`answers`.
        x: texts, shape (b, T).
        last: positions of their last tokens.
        starts: positions before the first token of each answer, shape (b,).
    """
    own, rows = predictor.task or task, torch.arange(len(x), device=x.device)
    at = torch.tensor(last, device=x.device)
    if predictor.combine is None and own.network.output_rows is not None:
        # Outputs of one position a text: those of all of them may not fit into memory.
        members = [
            own.predicted(own.network.classify(model, own.network.features(model, x)[rows, at])) for model in models
        ]
        predicted = members[0] if len(members) == 1 else own.mixed(members)
    else:
        asked = torch.arange(x.shape[1], device=x.device) >= starts[:, None]
        predicted = predictor.predictions(models, x, task, asked)[rows, at]
    found: list[int] = predicted.argmax(-1).tolist()
    return found
