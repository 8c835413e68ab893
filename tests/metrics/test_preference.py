"""Losses of pairs of answers against formulas in Python's own numbers, their gradients, and sums of pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from rayfl.metrics.preference import PreferenceLoss, PreferenceMeasures

PAIRS = 7


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of both answers, their lengths, and those of a reference."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-20 * torch.rand(PAIRS, 2, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2))
    return policy, torch.randint(1, 9, (PAIRS, 2), generator=generator), reference


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value)) if value > 0 else value - math.log1p(math.exp(value))


def by_formula(loss: PreferenceLoss, w: float, l: float, m: int, n: int, p: float, q: float) -> tuple[float, float]:  # noqa: E741
    """Loss and margin of a pair as the papers write them: log pi(w), log pi(l), |w|, |l|, log pi_ref of both."""
    b, e = loss.beta, loss.label_smoothing
    if loss.kind == "dpo":
        h = b * ((w - p) - (l - q))
        return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h), h
    if loss.kind == "ipo":
        h = (w - p) / m - (l - q) / n
        return (h - 1 / (2 * b)) ** 2, b * h
    if loss.kind == "simpo":
        h = b * w / m - b * l / n
        return -log_sigmoid(h - loss.gamma), h
    likely, less = math.exp(w / m), math.exp(l / n)
    odds = math.log(likely / (1 - likely)) - math.log(less / (1 - less))
    return -w / m - loss.odds_weight * log_sigmoid(odds), odds


LOSSES = [
    PreferenceLoss(),
    PreferenceLoss(beta=0.7, label_smoothing=0.2),
    PreferenceLoss("ipo", beta=0.3),
    PreferenceLoss("simpo", beta=2.5, gamma=0.8),
    PreferenceLoss("orpo", odds_weight=0.4),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.label_smoothing}")
def test_losses_and_gradients_are_those_of_the_papers_formulas(loss: PreferenceLoss) -> None:
    policy, lengths, reference = drawn()
    policy.requires_grad_()
    losses, margins = loss(policy, lengths, reference if loss.has_reference else None)
    rows = [(*a, *n, *r) for a, n, r in zip(policy.tolist(), lengths.tolist(), reference.tolist(), strict=True)]
    expected = [by_formula(loss, *row) for row in rows]
    torch.testing.assert_close(losses.tolist(), [one for one, _ in expected], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(margins.tolist(), [one for _, one in expected], rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    step = 1e-5
    for place, row in enumerate(rows):
        for answer in range(2):
            moved = [[*row[:answer], row[answer] + sign * step, *row[answer + 1 :]] for sign in (1, -1)]
            up, down = (by_formula(loss, *one)[0] for one in moved)
            assert float(gradient[place, answer]) == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.label_smoothing}")
def test_stacks_of_clients_have_their_own_losses(loss: PreferenceLoss) -> None:
    clients = [drawn(seed) for seed in range(3)]
    stacked = [torch.stack(column) for column in zip(*clients, strict=True)]
    found = vmap(lambda *given: torch.stack(loss(*given)))(*stacked) if loss.has_reference else vmap(
        lambda policy, lengths: torch.stack(loss(policy, lengths))
    )(*stacked[:2])  # fmt: skip
    for one, own in zip(found, clients, strict=True):
        assert torch.equal(one, torch.stack(loss(*(own if loss.has_reference else own[:2]))))


def test_an_answer_that_is_certain_has_a_finite_loss_and_gradient() -> None:
    policy = torch.tensor([[0.0, -1e-9], [-1e-12, -300.0]], dtype=torch.float64, requires_grad=True)
    losses, margins = PreferenceLoss("orpo")(policy, torch.tensor([[3, 3], [1, 2]]))
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert losses.isfinite().all() and margins.isfinite().all() and gradient.isfinite().all()
    assert margins[1] > 100


def test_measures_are_means_over_pairs_and_a_margin_of_zero_is_no_preference() -> None:
    measures = PreferenceMeasures()
    rows = torch.tensor([[0.5, 1.0], [0.7, 0.0], [1.5, -2.0], [0.1, 0.25]])
    whole = measures.statistics(rows, torch.zeros(4, 2, 3, dtype=torch.int64))
    assert whole.tolist() == pytest.approx([4, 2, -0.75, 2.8])
    parts = [measures.statistics(rows[a:b], torch.zeros(b - a, 2, 3)) for a, b in ((0, 1), (1, 4))]
    assert (sum(parts) - whole).abs().max() < 1e-7
    found = measures.values(np.stack([whole.numpy(), np.zeros(4)]))
    assert found["preference_accuracy"][0] == 0.5 and found["margin"][0] == -0.1875
    assert found["loss"][0] == pytest.approx(0.7) and np.isnan(found["loss"][1])
    assert [metric.name for metric in measures.metrics] == ["preference_accuracy", "margin", "loss"]
    masked = measures.added([measures.by_sample(rows, rows)[0]], torch.tensor([True, False, False, True]))
    assert masked.tolist() == pytest.approx([2, 2, 1.25, 0.6])
