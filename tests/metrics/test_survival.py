"""Cox's loss and the concordance index against double loops over all pairs, however samples are brought together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from rayfl.metrics import Statistics
from rayfl.metrics import survival as module
from rayfl.metrics.survival import SurvivalMeasures, cox_losses

torch.set_num_threads(1)
MEASURES = SurvivalMeasures()


def drawn(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Risks and targets with many ties, among risks, too."""
    generator = np.random.default_rng(seed)
    risk = generator.integers(-3, 4, n) / 2
    y = np.stack([generator.integers(0, 6, n), generator.integers(0, 2, n)], 1)
    return torch.tensor(risk, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).view(n, 2)


def by_loops(risk: Tensor, y: Tensor) -> tuple[list[float], float, int]:
    """Losses by sample, pairs in the right order, and pairs."""
    losses, right, pairs = [], 0.0, 0
    samples = list(zip(risk.tolist(), *y.T.tolist(), strict=True))
    for own, time, event in samples:
        at_risk = sum(math.exp(other) for other, later, _ in samples if later >= time)
        losses.append(math.log(at_risk) - own if event else 0.0)
        for other, later, seen in samples:
            if event and (later > time or (later == time and not seen)):
                pairs += 1
                right += 1.0 if own > other else 0.5 if own == other else 0.0
    return losses, right, pairs


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 25))
def test_losses_and_pairs_are_those_of_double_loops(seed: int, n: int) -> None:
    risk, y = drawn(seed, n)
    losses, right, pairs = by_loops(risk, y)
    torch.testing.assert_close(cox_losses(risk, y), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    found = MEASURES.statistics(risk[:, None], y)
    assert found.dtype == torch.float64 and found[[0, 2, 3]].tolist() == [n, right, pairs]
    assert found[1].item() == pytest.approx(sum(losses), rel=1e-6, abs=1e-9)
    metrics = Statistics.from_vector(found, MEASURES).metrics()
    assert math.isnan(metrics["c_index"]) if not pairs else metrics["c_index"] == pytest.approx(right / pairs)


def test_few_pairs_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    risk, y = drawn(1, 33)
    whole = MEASURES.statistics(risk[:, None], y)
    monkeypatch.setattr(module, "_PAIRS", 70)
    found = MEASURES.statistics(risk[:, None], y)
    assert torch.equal(whole[[0, 2, 3]], found[[0, 2, 3]])
    torch.testing.assert_close(whole, found)


def test_padded_clients_have_the_sums_of_their_own_samples() -> None:
    clients = [drawn(2, 9), drawn(3, 0), drawn(4, 5)]
    rows, mask = torch.full((3, 9, 3), 7.0, dtype=torch.float64), torch.zeros(3, 9, dtype=torch.bool)
    for place, (risk, y) in enumerate(clients):
        rows[place, : len(risk)] = MEASURES.by_sample(risk[:, None], y)[0]
        mask[place, : len(risk)] = True
    found = MEASURES.added([rows], mask)
    torch.testing.assert_close(found, torch.stack([MEASURES.statistics(risk[:, None], y) for risk, y in clients]))


def test_padding_has_no_loss_and_no_gradient_looped_and_under_vmap() -> None:
    risk, y = drawn(5, 8)
    padded = torch.cat([risk, torch.tensor([50.0, -1.0])])
    targets = torch.cat([y, torch.tensor([[99.0, 1.0], [0.0, 1.0]])])
    present = torch.tensor([1.0] * 8 + [0.0] * 2)
    found = cox_losses(padded, targets, present)
    torch.testing.assert_close(found[:8], cox_losses(risk, y))
    assert found[8:].tolist() == [0, 0]
    slope = grad(lambda own: cox_losses(own, targets, present).sum())(padded)
    torch.testing.assert_close(slope[:8], grad(lambda own: cox_losses(own, y).sum())(risk))
    assert slope[8:].tolist() == [0, 0]
    both = vmap(cox_losses)(*(torch.stack([one, one]) for one in (padded, targets, present)))
    torch.testing.assert_close(both, torch.stack([found, found]))


def test_a_batch_without_an_event_has_the_loss_and_the_gradient_0() -> None:
    y = torch.tensor([[3.0, 0.0], [5.0, 0.0]])
    slope = grad(lambda risk: cox_losses(risk, y).sum())(torch.tensor([0.5, 2.0]))
    assert slope.tolist() == [0, 0] and cox_losses(torch.tensor([0.5, 2.0]), y).tolist() == [0, 0]


def test_huge_risks_do_not_overflow() -> None:
    y = torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    assert cox_losses(torch.tensor([0.0, 1000.0]), y).tolist() == [1000, 0]


def test_padding_of_risks_that_are_not_finite_has_no_loss() -> None:
    """Padding repeats another client's samples, whose model may have diverged."""
    risk, y = drawn(0, 6)
    padded = torch.cat([risk, torch.full((2,), torch.inf)])
    targets = torch.cat([y, torch.tensor([[9.0, 1.0], [0.0, 1.0]])])
    present = torch.tensor([1.0] * 6 + [0.0] * 2)
    found = cox_losses(padded, targets, present)
    torch.testing.assert_close(found[:6], cox_losses(risk, y))
    assert (found[6:] == 0).all()
