"""What a run's language models answer to their clients' prompts, beside the answers that the data have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rayfl.data.sources.base import Decoder
from rayfl.engine.transfers import move_trees
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples
from rayfl.metrics.answers import rouge_l, words
from rayfl.runs.committed import CommittedModels, check_client, personalized_predictor
from rayfl.runs.devices import device_of
from rayfl.tasks.further_tasks import LanguageModel
from rayfl.tasks.generation import answers, prompts_of


@dataclass(frozen=True)
class Answer:
    """A prompt, and what was answered.

    Attributes:
        client: the client's number.
        name: the client's name.
        model: row of the tables.
        sample: which of the client's samples was answered, in the order of this list.
        turn: which of its responses; a sample is a conversation.
        prompt: the text before the response.
        reference: the response that the data have.
        answer: the one that was generated.
        rouge_l: ROUGE-L of the answer's words, from 0 to 1; of tokens where nobody knows how they are written.
        exact: whether the answer has the tokens of the reference, with the one that ends it.
        tokens: how many were generated.
        ended: whether the last of them is the one that ends answers.
    """

    client: int
    name: str
    model: str
    sample: int
    turn: int
    prompt: str
    reference: str
    answer: str
    rouge_l: float
    exact: bool
    tokens: int
    ended: bool


def answered(
    models: CommittedModels,
    model: str | None = None,
    clients: Sequence[int] = (),
    samples: int = 10,
    split: str = "test",
    most: int = 64,
    device: str = "auto",
) -> Iterator[tuple[int, list[Answer]]]:
    """Has each client's model answer the prompts of its samples, by greedy decoding; yields answers by client.

    Args:
        models: of a run that learns responses to prompts; of one that learns which of two answers is preferred, that
            one is the reference.
        model: a row of the tables; None: each method's personalized model.
        clients: whose samples; none: of all that have some in the split.
        samples: of each client at most, drawn at random (stream ``inspection``).
        split: ``train``, ``validation`` or ``test``.
        most: tokens of an answer at most.
        device: ``cpu``, ``cuda``, or ``auto``: cuda if there is one.

    Raises:
        ConfigError: for other tasks, texts without prompts, an unknown client, or a device that is not there.
    """
    parts, place = models.parts, device_of(device)
    if parts.task.target not in ("tokens", "preference"):
        raise ConfigError(
            f"{models.run.uri} is a run of {parts.task.name}; answers are of task=language_model and task=preference"
        )
    if split not in SPLITS:
        raise ConfigError(f"--split: answers takes {', '.join(SPLITS)}, not {split!r}")
    for client in clients:
        check_client(models.run, client)
    decoder = models.run.config.dataset.decoder() or _Numbers()
    for client in clients or range(parts.dataset.num_clients):
        if not clients and not len(models.dataset.load(client)[split]):
            continue
        yield client, _of_client(models, decoder, client, model, samples, split, most, place)


def _of_client(
    models: CommittedModels,
    decoder: Decoder,
    client: int,
    model: str | None,
    samples: int,
    split: str,
    most: int,
    device: torch.device,
) -> list[Answer]:
    examples, task = models.pooled(split, samples, [client]), models.parts.task
    if task.target == "preference":
        examples, task = Examples(examples.x[:, 0], examples.y[:, 0]), LanguageModel(task.network)
    texts = [prompts_of(x, y) for x, y in zip(examples.x, examples.y, strict=True)]
    if any(len(one.tokens) == 1 for prompts in texts for one in prompts):
        raise ConfigError(
            f"{models.run.uri}: its texts are learned from their first token on: answers need prompts, such as those "
            "of dataset=instructions"
        )
    asked = [(sample, turn, one) for sample, prompts in enumerate(texts) for turn, one in enumerate(prompts)]
    row, predictor = personalized_predictor(models, client, model)
    built = tuple(move_trees(predictor.built(), device))
    found = answers(
        replace(predictor, models=built), task, [one for *_, one in asked], most, examples.x.shape[1],
        decoder.end, device,
    )  # fmt: skip
    listed = []
    for (sample, turn, one), tokens in zip(asked, found, strict=True):
        reference, answer = decoder.text(one.response), decoder.text(tokens)
        listed.append(
            Answer(
                client,
                models.parts.dataset.names[client],
                row,
                sample,
                turn,
                decoder.text(one.tokens),
                reference,
                answer,
                rouge_l(words(answer), words(reference)),
                tuple(tokens) == one.response,
                len(tokens),
                tokens[-1] == decoder.end,
            )
        )
    return listed


def summary(listed: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Returns the scores of answers: means over clients with their standard deviations, and over all answers.

    Args:
        listed: answers by client, at least one each.
    """
    found: dict[str, Any] = {"clients": len(listed), "answers": sum(map(len, listed))}
    for name in ("rouge_l", "exact", "ended"):
        values = [[float(getattr(one, name)) for one in own] for own in listed]
        means = np.array([np.mean(own) for own in values])
        found[name], found[f"{name}_std"] = float(means.mean()), float(means.std())
        found[f"pooled_{name}"] = float(np.mean(np.concatenate(values)))
    return found


class _Numbers:
    """Texts of tokens that nobody knows how to write: their numbers."""

    end: int | None = None

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))
