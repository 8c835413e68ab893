"""Texts of unequal lengths: what models make of padding, and batches that are no wider than they need to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rayfl
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import GradientRequest
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.language import IGNORED
from rayfl.models.base import Network
from rayfl.models.networks.tokens import BagOfTokens, FastText, WindowModel
from rayfl.models.zoo import CharLSTM
from rayfl.params import leaves
from rayfl.tasks.base import Predictor
from rayfl.tasks.classification import Classification
from rayfl.tasks.further_tasks import LanguageModel
from rayfl.tasks.texts import PaddingTrimmer, trimmer_of
from rayfl.tracking.callback import Callback
from tests.support.experiments import assert_same, outcome
from tests.support.problems import CPU, cross_entropy, request

WIDTH, TOKENS, PADDING = 16, 9, 9
SPEC = InputSpec("tokens", (WIDTH,), 3, TOKENS + 1, padding=PADDING)
MODELS = {
    "fasttext": FastText(embedding=4),
    "pflfast": FastText(embedding=4, hidden=4, mean="positions"),
    "char_lstm": CharLSTM(embedding=3, hidden=5),
}


class Seen(BagOfTokens):
    """Notes how wide the batches are that it sees."""

    widths: list[int] = []  # noqa: RUF012

    def features(self, x: Tensor) -> Tensor:
        self.widths.append(x.shape[-1])
        return super().features(x)


def texts(count: int, seed: int = 0, longest: int = 5) -> Examples:
    """Texts of 1 to ``longest`` tokens, one in eight of them of 13."""
    generator = np.random.default_rng(seed)
    lengths = np.where(np.arange(count) % 8 == 7, 13, generator.integers(1, longest + 1, count))
    x = np.where(np.arange(WIDTH) < lengths[:, np.newaxis], generator.integers(0, TOKENS, (count, WIDTH)), PADDING)
    return Examples(torch.from_numpy(x), torch.from_numpy(x[:, 0] % 3))


def trained(factory: Any, clients: Sequence[Examples], mode: str) -> list[dict[str, Tensor]]:
    network = Network(factory)
    task, model = Classification(network), network.initialize(0)
    requests = [request(one, model, client=k, batch_size=4) for k, one in enumerate(clients)]
    if mode == "vectorized":
        return [dict(leaves(tree)) for tree in vectorized.train(requests, task, CPU)]
    return [dict(leaves(looped.train(one, task, CPU))) for one in requests]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_do_not_depend_on_padding(name: str) -> None:
    network = MODELS[name].network(SPEC)
    assert network.padding == PADDING
    model, x = network.initialize(0), texts(6, longest=4).x[:6]
    whole = network.logits(model, x)
    torch.testing.assert_close(network.logits(model, x[:, :4]), whole)
    assert not torch.allclose(network.logits(model, x[:, :1]), whole)


def test_an_lstm_reads_to_the_last_token_of_each_text() -> None:
    network = CharLSTM(embedding=3, hidden=5).network(SPEC)
    model, x = network.initialize(0), texts(8).x
    packed = nn.utils.rnn.pack_padded_sequence(
        model["embedding.weight"][x], SPEC.lengths(x), batch_first=True, enforce_sorted=False
    )
    lstm = nn.LSTM(3, 5, 2, batch_first=True)
    lstm.load_state_dict({key.removeprefix("lstm."): value for key, value in model.items() if "lstm." in key})
    torch.testing.assert_close(network.features(model, x), lstm(packed)[1][0][-1])


def test_masks_and_lengths() -> None:
    x = torch.tensor([[1, 9, 2, 9], [9, 9, 9, 9], [3, 0, 0, 0]])
    assert SPEC.lengths(x).tolist() == [3, 0, 4]
    assert SPEC.mask(x).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert torch.equal(torch.func.vmap(SPEC.mask)(x[:, None]), SPEC.mask(x)[:, None])
    everything = InputSpec("tokens", (4,), 2, 10)
    assert everything.mask(x).all() and everything.lengths(x).tolist() == [4, 4, 4]


def test_the_model_of_pfllib_has_the_parameters_that_its_pages_count() -> None:
    spec = InputSpec("tokens", (200,), 4, 32_000, padding=0)
    assert FastText(embedding=512, hidden=512, mean="positions").network(spec).num_parameters == 16_648_708
    small = InputSpec("tokens", (200,), 4, 98_635, padding=0)
    assert FastText(embedding=32, hidden=32, mean="positions").network(small).num_parameters == 3_157_508
    network = MODELS["pflfast"].network(SPEC)
    model, x = network.initialize(0), torch.full((1, WIDTH), PADDING)
    x[0, :2] = torch.tensor([3, 5])
    mean = model["embedding.weight"][[3, 5]].sum(0) / WIDTH
    expected = model["hidden.weight"] @ mean + model["hidden.bias"]
    torch.testing.assert_close(network.features(model, x)[0], expected)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_batches_are_as_wide_as_their_longest_text_needs_and_train_the_same(mode: str) -> None:
    clients = [texts(count, seed) for seed, count in enumerate((16, 16, 9))]
    Seen.widths = []
    found = trained(lambda: Seen(SPEC, 4), clients, mode)
    assert set(Seen.widths) <= {1, 2, 3, 4, 6, WIDTH} and min(Seen.widths) < WIDTH
    Seen.widths = []

    def uncut() -> BagOfTokens:
        model = Seen(SPEC, 4)
        model.padding = None
        return model

    expected = trained(uncut, clients, mode)
    assert set(Seen.widths) == {WIDTH}
    for one, other in zip(found, expected, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name])


def test_gradients_and_scores_are_those_of_whole_rows() -> None:
    network = Network(lambda: Seen(SPEC, 4))
    task, examples = Classification(network), texts(7)
    model = network.initialize(0)
    Seen.widths = []
    found = looped.gradient(GradientRequest(0, examples, model, cross_entropy, 3, seed=0), task, CPU)
    scored = evaluate({"m": Predictor.of(model)}, examples, task, 3)["m"]
    assert set(Seen.widths) <= {1, 2, 3, 4, 6}
    network.padding = None
    expected = looped.gradient(GradientRequest(0, examples, model, cross_entropy, 3, seed=0), task, CPU)
    for (_, one), (_, other) in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
    np.testing.assert_allclose(scored.vector, evaluate({"m": Predictor.of(model)}, examples, task, 3)["m"].vector)


def test_targets_at_each_position_are_cut_too_and_none_that_is_asked_for_is_lost() -> None:
    spec = InputSpec("tokens", (8,), 5, 6, "tokens", padding=5)
    task = LanguageModel(WindowModel(embedding=3, hidden=4).network(spec), spec=spec)
    trimmer = trimmer_of(task)
    assert trimmer == PaddingTrimmer(5, targets=True)
    x = torch.tensor([[1, 2, 5, 5, 5, 5, 5, 5], [1, 5, 5, 5, 5, 5, 5, 5]])
    y = torch.where(x == 5, IGNORED, x)
    cut = trimmer.cut(x, y, trimmer.lengths(x, y))
    assert [part.tolist() for part in cut] == [x[:, :2].tolist(), y[:, :2].tolist()]
    y[1, 4] = 3
    assert trimmer.lengths(x, y).tolist() == [2, 5]
    assert trimmer.cut(x, y, trimmer.lengths(x, y))[0].shape == (2, 6)
    model = task.network.initialize(0)
    examples = Examples(x, y)
    found = evaluate({"m": Predictor.of(model)}, examples, task, 2)["m"]
    task.network.padding = None
    np.testing.assert_allclose(found.vector, evaluate({"m": Predictor.of(model)}, examples, task, 2)["m"].vector)


class Interrupted(Exception):
    """What ends a run in its midst."""


class Stop(Callback):
    """Ends the run after some rounds, as a crash of the driver would."""

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == 2:
            raise Interrupted


@pytest.mark.parametrize("model", ["fasttext", pytest.param("char_lstm", marks=pytest.mark.slow)])
def test_tokens_with_lengths_of_an_own_function_looped_stacked_and_through_a_stop(model: str, tmp_path: Path) -> None:
    settings = {
        "dataset": "tests.support.own_data:texts",
        "model": {"name": model, "embedding": 4} | ({} if model == "fasttext" else {"hidden": 4}),
        "algorithm": "ditto",
        "train": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "batch_size": 5, "lr": 0.5},
        "tracking": {"tensorboard": False},
    }

    def run(name: str, callbacks: Sequence[Callback] = (), **changes: Any) -> Any:
        extra = {"cluster.backend": "inline", "storage_path": str(tmp_path), "name": name, **changes}
        return rayfl.run(settings, callbacks=callbacks, **extra)

    whole = run("whole")
    with pytest.raises(Interrupted):
        run("stopped", [Stop()])
    run("stopped")
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))
    if model == "fasttext":
        stacked = run("stacked", **{"engine.mode": "vectorized"})
        for name in ("loss", "top1"):
            one, other = (np.array(result.clients[name]).astype(float) for result in (whole, stacked))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
