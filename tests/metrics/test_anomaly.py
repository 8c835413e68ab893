"""The area under the ROC curve of anomalies' scores, against double loops and scikit-learn, and padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from rayfl.metrics import Statistics
from rayfl.metrics import anomaly as module
from rayfl.metrics.anomaly import AnomalyMeasures

torch.set_num_threads(1)
MEASURES = AnomalyMeasures((1, 3))


def drawn(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Scores with many ties, and classes 0 to 3, of which 1 and 3 are normal."""
    generator = np.random.default_rng(seed)
    scores, y = generator.integers(0, 5, n) / 2, generator.integers(0, 4, n)
    return torch.tensor(scores, dtype=torch.float32)[:, None], torch.tensor(y)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 25))
def test_pairs_and_errors_are_those_of_double_loops(seed: int, n: int) -> None:
    scores, y = drawn(seed, n)
    right, pairs, total, normal = 0.0, 0, 0.0, 0
    samples = list(zip(scores[:, 0].tolist(), y.tolist(), strict=True))
    for own, kind in samples:
        if kind in (1, 3):
            total, normal = total + own, normal + 1
            continue
        for other, usual in samples:
            if usual in (1, 3):
                pairs += 1
                right += 1.0 if own > other else 0.5 if own == other else 0.0
    found = MEASURES.statistics(scores, y)
    assert found.dtype == torch.float64
    assert found.tolist() == [n, total, normal, total, right, pairs]
    everything = float(scores.double().sum())
    assert AnomalyMeasures((1, 3), of_all=True).statistics(scores, y).tolist() == [
        n, everything, normal, total, right, pairs
    ]  # fmt: skip
    metrics = Statistics.from_vector(found, MEASURES).metrics()
    assert math.isnan(metrics["auroc"]) if not pairs else metrics["auroc"] == pytest.approx(right / pairs)
    assert math.isnan(metrics["error"]) if not normal else metrics["error"] == pytest.approx(total / normal)
    assert math.isnan(metrics["loss"]) if not n else metrics["loss"] == pytest.approx(total / n)


def test_it_is_scikit_learns_area() -> None:
    scores, y = drawn(4, 200)
    found = Statistics.from_vector(MEASURES.statistics(scores, y), MEASURES).metrics()["auroc"]
    assert found == pytest.approx(roc_auc_score(~np.isin(y.numpy(), (1, 3)), scores[:, 0].numpy()))


def test_few_pairs_at_a_time_and_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, y = drawn(1, 33)
    whole = MEASURES.statistics(scores, y)
    (row,) = MEASURES.by_sample(scores, y)
    padded = torch.cat([row, row.new_tensor([[math.nan, 1.0], [7.0, 0.0]])])
    mask = torch.arange(35) < 33
    assert torch.equal(MEASURES.added([padded], mask), whole)
    both = MEASURES.added([torch.stack([padded, padded])], torch.stack([mask, torch.arange(35) < 5]))
    assert torch.equal(both[0], whole) and torch.equal(both[1], MEASURES.statistics(scores[:5], y[:5]))
    monkeypatch.setattr(module, "_PAIRS", 100)
    assert torch.equal(MEASURES.statistics(scores, y), whole)


def test_scores_that_are_no_numbers_tell_nothing() -> None:
    scores = torch.tensor([[math.nan], [math.nan], [1.0]])
    found = Statistics.from_vector(MEASURES.statistics(scores, torch.tensor([0, 2, 1])), MEASURES).metrics()
    assert found["auroc"] == 0
    assert MEASURES.undefined("auroc") == "there are no normal samples, or no anomalies"
    assert MEASURES.undefined("error") == "there are no normal samples"
    assert MEASURES.undefined("loss") == ""
