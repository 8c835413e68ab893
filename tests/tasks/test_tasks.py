"""The losses of all tasks, alone and in padded stacks, what several models predict together, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from rayfl.examples import InputSpec
from rayfl.metrics.language import IGNORED
from rayfl.models.networks.perceptron import TwoNN
from rayfl.models.networks.tokens import FastText, WindowModel
from rayfl.models.networks.unet import UNetModel
from rayfl.tasks.base import Batch, NetworkTask, Predictor
from rayfl.tasks.classification import Classification
from rayfl.tasks.further_tasks import ErrorLoss, LanguageModel, Multilabel, Regression, Segmentation

N, OUTPUTS, LENGTH, TOKENS = 7, 3, 5, 6


def made(task: str) -> tuple[NetworkTask, Tensor, Tensor]:
    """A task on a small network, inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    if task == "language_model":
        spec = InputSpec("tokens", (LENGTH,), TOKENS, TOKENS, "tokens")
        text = torch.randint(1, TOKENS, (N, LENGTH + 1), generator=generator)
        y = text[:, 1:].clone()
        y[2, 3:] = IGNORED
        return LanguageModel(WindowModel(embedding=3, hidden=4).network(spec), (), spec), text[:, :-1], y
    if task == "segmentation":
        spec = InputSpec("image", (1, 4, 5), OUTPUTS, target="mask")
        masks = torch.randint(OUTPUTS, (N, 4, 5), generator=generator)
        masks[1, :2] = IGNORED
        images = torch.randn(N, 1, 4, 5, generator=generator)
        return Segmentation(UNetModel(width=2, depth=1).network(spec), (), spec), images, masks
    target: Any = {"regression": "values", "multilabel": "labels"}[task]
    spec = InputSpec("image", (4,), OUTPUTS, target=target)
    network = TwoNN(hidden=(5,)).network(spec)
    if task == "regression":
        return Regression(network, (), spec), x, torch.randn(N, OUTPUTS, generator=generator)
    return Multilabel(network, (), spec), x, (torch.rand(N, OUTPUTS, generator=generator) < 0.5).float()


TASKS = ("regression", "multilabel", "language_model", "segmentation")


@pytest.mark.parametrize("task", TASKS)
def test_losses_are_those_of_pytorch(task: str) -> None:
    learned, x, y = made(task)
    model = learned.network.initialize(0)
    outputs = learned.network.logits(model, x)
    expected = {
        "regression": lambda: F.mse_loss(outputs, y),
        "multilabel": lambda: F.binary_cross_entropy_with_logits(outputs, y),
        "language_model": lambda: F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=IGNORED),
        "segmentation": lambda: learned.measures.values(
            learned.measures.statistics(outputs.log_softmax(-1), y).detach().numpy()
        )["loss"],
    }[task]()
    torch.testing.assert_close(learned.loss(model, Batch(x, y)), torch.as_tensor(expected, dtype=torch.float32))
    assert not isinstance(learned, Classification)


@pytest.mark.parametrize(
    ("error", "reference"),
    [
        (ErrorLoss("squared"), F.mse_loss),
        (ErrorLoss("absolute"), F.l1_loss),
        (ErrorLoss("huber", 0.7), partial(F.huber_loss, delta=0.7)),
    ],
)
def test_losses_of_numbers(error: ErrorLoss, reference: Callable[..., Tensor]) -> None:
    plain, x, y = made("regression")
    learned = Regression(plain.network, (), plain.spec, error)
    outputs = learned.network.logits(learned.network.initialize(0), x)
    torch.testing.assert_close(learned.loss_of(outputs, Batch(x, y)), reference(outputs, y))
    statistics = learned.measures.statistics(outputs, y).numpy()
    assert float(learned.measures.values(statistics)["loss"]) == pytest.approx(float(reference(outputs, y)), rel=1e-5)


def test_positive_weights() -> None:
    plain, x, y = made("multilabel")
    learned = Multilabel(plain.network, (), plain.spec, (1.0, 2.0, 5.0))
    outputs = learned.network.logits(learned.network.initialize(0), x)
    expected = F.binary_cross_entropy_with_logits(outputs, y, pos_weight=torch.tensor([1.0, 2.0, 5.0]))
    torch.testing.assert_close(learned.loss_of(outputs, Batch(x, y)), expected)


@pytest.mark.parametrize("task", TASKS)
def test_padding_changes_no_loss_and_no_gradient_also_under_vmap(task: str) -> None:
    learned, x, y = made(task)
    sizes, models = (N, 4), [learned.network.initialize(seed) for seed in (0, 1)]
    masks = torch.stack([(torch.arange(N) < size).float() for size in sizes])
    padded = [torch.cat([part[:size], part[:1].expand(N - size, *part.shape[1:])]) for part in (x, y) for size in sizes]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}

    def loss(model: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return learned.loss(model, Batch(x, y, mask))

    found = vmap(grad(loss))(stacked, torch.stack(padded[:2]), torch.stack(padded[2:]), masks)
    for place, size in enumerate(sizes):
        expected = grad(lambda model, n=size: learned.loss(model, Batch(x[:n], y[:n])))(models[place])
        for name, value in expected.items():
            torch.testing.assert_close(found[name][place], value, rtol=1e-4, atol=1e-6)


def test_a_text_in_which_no_position_counts_has_no_loss() -> None:
    learned, x, y = made("language_model")
    assert float(learned.loss(learned.network.initialize(0), Batch(x, torch.full_like(y, IGNORED)))) == 0


@pytest.mark.parametrize("task", TASKS)
def test_several_models_predict_their_mean(task: str) -> None:
    learned, x, _ = made(task)
    models = [learned.network.initialize(seed) for seed in range(3)]
    found = Predictor.of(*models).predictions(models, x, learned)
    outputs = torch.stack([learned.network.logits(model, x) for model in models])
    expected = {
        "regression": lambda: outputs.mean(0),
        "multilabel": lambda: outputs.sigmoid().mean(0).logit(),
        "language_model": lambda: outputs.softmax(-1).mean(0).log(),
        "segmentation": lambda: outputs.softmax(-1).mean(0).log(),
    }[task]()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_is_no_part_of_a_text() -> None:
    spec = InputSpec("tokens", (6,), 2, 9, padding=0)
    network = FastText(embedding=4).network(spec)
    model = network.initialize(0)
    text = torch.tensor([[3, 5, 0, 0, 0, 0], [5, 3, 3, 5, 0, 0]])
    first, second = network.features(model, text)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, model["embedding.weight"][[3, 5]].mean(0))


def test_a_window_of_one_reads_its_own_token_alone() -> None:
    learned, x, _ = made("language_model")
    assert learned.spec is not None
    network = WindowModel(window=1, embedding=3, hidden=4).network(learned.spec)
    logits = network.logits(network.initialize(0), x)
    same = x[0, 1] == x
    assert torch.allclose(logits[same], logits[0, 1].expand(int(same.sum()), -1))


def test_a_window_reads_no_token_that_comes_later() -> None:
    learned, x, _ = made("language_model")
    model, other = learned.network.initialize(0), x.clone()
    other[:, 3] = x[:, 3] % (TOKENS - 1) + 1
    before, after = (learned.network.logits(model, tokens) for tokens in (x, other))
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])
