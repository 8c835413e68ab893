"""Answers of language models: greedy decoding, by transformers and by a loop over single texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.scoring.evaluation import evaluate
from rayfl.examples import Examples
from rayfl.metrics.language import IGNORED
from rayfl.tasks import generation
from rayfl.tasks.base import Predictor
from rayfl.tasks.further_tasks import LanguageModel
from rayfl.tasks.generation import Prompt, answers, prompts_of
from tests.support.bases import CAUSAL, NEXT, language_network, merged, texts, trained, transformers, write_base

CPU = torch.device("cpu")


def given(samples: int, seed: int) -> list[Prompt]:
    return [one for x, y in zip(*texts(samples, seed), strict=True) for one in prompts_of(x, y)]


def answered(predictor: Predictor, task: LanguageModel, prompts: list[Prompt], **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {"most": 6, "length": 12, "end": None, "device": CPU, **changes}
    return list(answers(predictor, task, prompts, **options))


def test_a_text_has_a_prompt_for_each_response() -> None:
    x = torch.tensor([5, 6, 7, 8, 9, 0])
    assert prompts_of(x, torch.tensor([IGNORED, 7, 8, IGNORED, IGNORED, IGNORED])) == [Prompt((5, 6), (7, 8))]
    two = torch.tensor([6, IGNORED, IGNORED, 9, 4, 3])
    assert prompts_of(x, two) == [Prompt((5,), (6,)), Prompt((5, 6, 7, 8), (9, 4, 3))]
    assert prompts_of(x, torch.full((6,), IGNORED)) == []


@pytest.mark.two_cases
@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_answers_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_ROWS", 3 * 12)  # three texts in a pass
    net = language_network(family)
    task, tree = LanguageModel(net, (), NEXT), trained(net, 3, 0.5)
    model, prompts = merged(family, net, tree), given(8, 2)
    settings = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    for prompt, found in zip(prompts, answered(Predictor.of(tree), task, prompts), strict=True):
        room = min(6, 12 - len(prompt.tokens) + 1)
        ids = torch.tensor([prompt.tokens])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, max_new_tokens=room
        )
        assert found == expected[0, len(prompt.tokens) :].tolist()


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_that_are_read_once_say_what_whole_texts_say(window: int | None, tmp_path: Path) -> None:
    """With a window, tokens see the last few before them alone, however a text is filled up."""
    folder = write_base("mistral", tmp_path, causal=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "sliding_window": window}))
    net = language_network("mistral", folder=str(folder))
    task, trees = LanguageModel(net, (), NEXT), [trained(net, seed, 0.5) for seed in (1, 2)]
    prompts, one, two = given(9, 3), Predictor.of(trees[0]), Predictor.of(*trees)
    once = [answered(one, task, prompts), answered(two, task, prompts)]
    net.reading = None  # type: ignore[method-assign]
    assert once == [answered(one, task, prompts), answered(two, task, prompts)]


def test_fewer_are_answered_at_a_time_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    net = language_network("llama")
    task, tree = LanguageModel(net, (), NEXT), trained(net, 4, 0.5)
    prompts, sizes = given(9, 3), list[int]()
    whole = answered(Predictor.of(tree), task, prompts)
    features = type(net).reading

    def little(network: Any, tree: Any) -> Any:
        reading = features(network, tree)
        read = reading.read

        def limited(x: Tensor, known: Tensor | None = None) -> Tensor:
            sizes.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return read(x, known)

        monkeypatch.setattr(reading, "read", limited)
        return reading

    monkeypatch.setattr(type(net), "reading", little)
    assert answered(Predictor.of(tree), task, prompts) == whole
    assert max(sizes) == 9 and sum(size > 3 for size in sizes) == 2


def test_an_answer_ends_with_its_token_its_length_or_the_text() -> None:
    net = language_network("gpt2")
    task, tree = LanguageModel(net, (), NEXT), trained(net, 4, 0.5)
    prompts = given(12, 5)
    whole = answered(Predictor.of(tree), task, prompts)
    assert all(len(found) == min(6, 13 - len(one.tokens)) for one, found in zip(prompts, whole, strict=True))
    end = whole[0][1]
    assert any(end in found[:-1] for found in whole)
    for found, before in zip(answered(Predictor.of(tree), task, prompts, end=end), whole, strict=True):
        assert found == (before[: before.index(end) + 1] if end in before else before)
    assert answered(Predictor.of(tree), task, prompts, most=2) == [found[:2] for found in whole]


def test_the_share_of_exact_answers_is_the_metric_of_evaluation() -> None:
    net = language_network("llama")
    task, tree = LanguageModel(net, (), NEXT), trained(net, 4, 0.5)
    x, y = texts(12, 6)
    prompts = [prompts_of(*one) for one in zip(x, y, strict=True)]
    for row, (one,) in enumerate(prompts):
        if row % 2:  # every second response is what the model itself would say
            said = answered(Predictor.of(tree), task, [one], most=len(one.response))[0]
            places = (y[row] != IGNORED).nonzero()[:, 0]
            y[row, places] = torch.tensor(said)
            x[row, (places + 1)[places + 1 < 12]] = torch.tensor(said)[places + 1 < 12]
    changed = [one for row in zip(x, y, strict=True) for one in prompts_of(*row)]
    found = [answered(Predictor.of(tree), task, [one], most=len(one.response))[0] for one in changed]
    exact = sum(tuple(said) == one.response for said, one in zip(found, changed, strict=True))
    scores = evaluate({"": Predictor.of(tree)}, Examples(x, y), task, 5)[""].metrics()
    assert 0 < exact < 12 and scores["exact_match"] == exact / 12


def test_ensembles_and_combined_models_answer_by_their_predictions() -> None:
    net = language_network("llama")
    task, prompts = LanguageModel(net, (), NEXT), given(6, 7)
    trees = [trained(net, seed, 0.5) for seed in (1, 2)]

    def expected(prompt: Prompt, share: float) -> list[int]:
        tokens = list(prompt.tokens)
        for _ in range(min(6, 13 - len(tokens))):
            with torch.no_grad():
                one, other = (net.logits(tree, torch.tensor([tokens]))[0, -1].softmax(-1) for tree in trees)
            tokens.append(int((share * one + (1 - share) * other).argmax()))
        return tokens[len(prompt.tokens) :]

    def mixed(models: Any, x: Tensor, task: Any, asked: Tensor) -> Tensor:
        starts = [len(one.tokens) - 1 for one in prompts]
        assert {int(row.int().argmax()) for row in asked} <= set(starts)
        one, other = (net.logits(model, x).softmax(-1) for model in models)
        return (0.8 * one + 0.2 * other).log()

    assert answered(Predictor.of(*trees), task, prompts) == [expected(one, 0.5) for one in prompts]
    combined = Predictor.of(*trees, combine=mixed, reads_asked=True)
    assert answered(combined, task, prompts) == [expected(one, 0.8) for one in prompts]
