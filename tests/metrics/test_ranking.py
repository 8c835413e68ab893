"""Hit rate, NDCG and the losses of rows of scores against sorting and plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from rayfl.metrics import Statistics
from rayfl.metrics.ranking import Pairing, RankingLoss, RankingMeasures

torch.set_num_threads(1)


def drawn(seed: int, n: int, others: int) -> Tensor:
    """Scores with many ties."""
    return torch.tensor(np.random.default_rng(seed).integers(-4, 5, (n, 1 + others)) / 2, dtype=torch.float32)


def place(row: list[float]) -> int:
    """The chosen item's place in a list that is sorted by scores, behind all others of its score."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i == 0))
    return 1 + order.index(0)


def by_formula(kind: Pairing, row: list[float]) -> float:
    sigmoid = [1 / (1 + math.exp(-one)) for one in row]
    if kind == "bce":
        return -(math.log(sigmoid[0]) + sum(math.log(1 - one) for one in sigmoid[1:])) / len(row)
    return -sum(math.log(1 / (1 + math.exp(one - row[0]))) for one in row[1:]) / (len(row) - 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 9), st.integers(1, 30), st.integers(1, 12))
def test_metrics_are_those_of_sorted_lists(seed: int, n: int, others: int, k: int) -> None:
    scores = drawn(seed, n, others)
    measures = RankingMeasures(RankingLoss("bpr"), k)
    found = measures.statistics(scores, torch.zeros(n, dtype=torch.int64))
    places = [place(row) for row in scores.tolist()]
    hits = [float(one <= k) for one in places]
    gains = [1 / math.log2(1 + one) if one <= k else 0.0 for one in places]
    assert found.dtype == torch.float64 and found[:2].tolist() == [n, sum(hits)]
    assert found[2].item() == pytest.approx(sum(gains))
    assert found[3].item() == pytest.approx(sum(by_formula("bpr", row) for row in scores.double().tolist()))
    if n:
        metrics = Statistics.from_vector(found, measures).metrics()
        assert metrics["hit_rate"] == sum(hits) / n and metrics["ndcg"] == pytest.approx(sum(gains) / n)


def test_one_score_for_all_items_is_the_last_place_and_so_is_what_is_no_number() -> None:
    measures = RankingMeasures(RankingLoss(), 3)
    rows = torch.zeros(3, 4)
    rows[1, 0], rows[2, 0] = torch.nan, 1
    found = measures.by_sample(rows, torch.zeros(3, dtype=torch.int64))[0]
    assert found[:, 1].tolist() == [0, 0, 1] and found[:, 2].tolist() == [0, 0, 1]


def test_samples_that_are_masked_do_not_count() -> None:
    measures, scores = RankingMeasures(RankingLoss(), 2), drawn(3, 6, 5)
    found = measures.by_sample(scores, torch.zeros(6, dtype=torch.int64))
    mask = torch.tensor([True, False, True, True, False, False])
    expected = measures.statistics(scores[mask], torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(measures.added(found, mask), expected)


@pytest.mark.parametrize("kind", ["bce", "bpr"])
def test_losses_and_gradients_are_the_papers_formulas(kind: Pairing) -> None:
    scores = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    losses = RankingLoss(kind)(scores)
    expected = torch.tensor([by_formula(kind, row) for row in scores.tolist()], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vmap(RankingLoss(kind))(scores), losses)
    (slopes,) = torch.autograd.grad(losses.sum(), scores)
    s = scores.detach()
    if kind == "bce":  # sigmoid(s) minus the label
        label = torch.zeros_like(s)
        label[:, 0] = 1
        wanted = (s.sigmoid() - label) / 6
    else:  # minus sigmoid(s_j - s_0) for the chosen item, plus it for j (Rendle et al., 2009, section 4.1)
        pulls = (s[:, 1:] - s[:, :1]).sigmoid() / 5
        wanted = torch.cat([-pulls.sum(1, keepdim=True), pulls], 1)
    torch.testing.assert_close(slopes, wanted, rtol=1e-12, atol=1e-12)
