"""Mergeable statistics against torchmetrics and hand-computed cases."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from rayfl.metrics import (
    NUM_BINS,
    STATISTICS_SIZE,
    Statistics,
    batch_statistics,
    first_best,
    metric_values,
    summarize,
)

torch.set_num_threads(1)


def statistics(log_probabilities: Tensor, labels: Tensor) -> Statistics:
    return Statistics.from_vector(batch_statistics(log_probabilities, labels))


def sample(seed: int, n: int, classes: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (torch.randn(n, classes, generator=generator) * temperature).softmax(1)
    # Below 1, because torchmetrics 1.9 puts a confidence of exactly 1 into a sixteenth bin of its own.
    return (0.999 * probabilities + 0.001 / classes).log(), torch.randint(classes, (n,), generator=generator)


def with_confidences(confidences: list[float], correct: list[int], classes: int = 5) -> tuple[Tensor, Tensor]:
    """Predictions of class 0 with the given confidence, the rest spread evenly; label 0 where correct, else 1."""
    top = torch.tensor(confidences, dtype=torch.float64)
    rest = ((1 - top) / (classes - 1))[:, None].expand(-1, classes - 1)
    return torch.cat([top[:, None], rest], 1).log(), 1 - torch.tensor(correct)


samples = st.builds(
    sample, st.integers(0, 2**32), st.integers(1, 60), st.integers(2, 12), st.sampled_from([0.2, 1.0, 4.0])
)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_equal_to_torchmetrics(data: tuple[Tensor, Tensor]) -> None:
    log_probabilities, labels = data
    probabilities, classes = log_probabilities.exp(), log_probabilities.shape[1]
    scaled = NUM_BINS * probabilities.amax(1)
    assume((scaled - scaled.round()).abs().min() > 1e-5)  # torchmetrics has bins [lower, upper)
    ours = statistics(log_probabilities, labels)
    for norm, value in (("l1", ours.ece), ("max", ours.mce)):
        oracle = MulticlassCalibrationError(classes, n_bins=NUM_BINS, norm=norm)
        assert value == pytest.approx(oracle(probabilities, labels).item(), abs=1e-5)
    for k, value in ((1, ours.top1), (5, ours.top5)):
        accuracy = MulticlassAccuracy(classes, top_k=min(k, classes), average="micro")
        assert value == pytest.approx(accuracy(log_probabilities, labels).item(), abs=1e-6)
    assert ours.loss == pytest.approx(torch.nn.functional.nll_loss(log_probabilities, labels).item(), rel=1e-5)
    assert 0 <= ours.ece <= ours.mce + 1e-12 <= 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(samples, st.data())
def test_statistics_of_a_union_are_the_sum(data: tuple[Tensor, Tensor], draw: st.DataObject) -> None:
    log_probabilities, labels = data
    cut = draw.draw(st.integers(0, len(labels)))
    whole = batch_statistics(log_probabilities, labels)
    parts = [batch_statistics(log_probabilities[part], labels[part]) for part in (slice(cut), slice(cut, None))]
    merged = Statistics.from_vector(parts[0]) + Statistics.from_vector(parts[1])
    inexact = np.zeros(STATISTICS_SIZE, dtype=bool)
    inexact[1] = True
    inexact[4 + NUM_BINS : 4 + 2 * NUM_BINS] = True
    np.testing.assert_array_equal(merged.vector[~inexact], whole.numpy()[~inexact])
    np.testing.assert_allclose(merged.vector, whole.numpy(), rtol=1e-12, atol=1e-12)
    assert merged.n == len(labels)


def test_golden_calibration_errors() -> None:
    ours = statistics(*with_confidences([0.95, 0.92, 0.61, 0.55, 0.30], [1, 0, 1, 0, 1]))
    assert ours.ece == pytest.approx(0.522, abs=1e-9)
    assert ours.mce == pytest.approx(0.92, abs=1e-9)
    assert ours.top1 == pytest.approx(0.6)


def test_calibration_of_a_union_is_not_the_mean() -> None:
    right, wrong = (statistics(*with_confidences([0.5] * 4, [hit] * 4)) for hit in (1, 0))
    assert right.ece == pytest.approx(0.5) and wrong.ece == pytest.approx(0.5)
    assert sum([right, wrong], Statistics.empty()).ece == pytest.approx(0)


def test_one_bin_gives_the_gap_between_accuracy_and_mean_confidence() -> None:
    ours = statistics(*with_confidences([0.81, 0.83, 0.85], [1, 0, 1]))
    assert ours.ece == pytest.approx(0.83 - 2 / 3)
    assert ours.mce == pytest.approx(ours.ece)


def test_bins_include_their_upper_edge() -> None:
    def bins(confidences: list[float]) -> list[int]:
        vector = batch_statistics(*with_confidences(confidences, [1] * len(confidences)))
        return vector[4 : 4 + NUM_BINS].nonzero().flatten().tolist()

    assert bins([0.6 - 1e-12, 0.6 + 1e-12, 1.0]) == [8, 9, 14]
    # Only edges that survive the logarithm and its inverse can be tested; those are all on common platforms.
    edges = torch.arange(4, NUM_BINS).double() / NUM_BINS
    exact = (edges.log().exp() == edges).nonzero().flatten() + 4
    assert len(exact) > 0
    assert bins((exact.double() / NUM_BINS).tolist()) == (exact - 1).tolist()


def test_perfect_and_uniform_predictors() -> None:
    perfect = statistics(torch.eye(6, dtype=torch.float64).log(), torch.arange(6))
    assert (perfect.loss, perfect.top1, perfect.top5, perfect.ece, perfect.mce) == (0, 1, 1, 0, 0)

    classes = 10
    uniform = statistics(torch.full((classes, classes), -math.log(classes)), torch.arange(classes))
    assert uniform.loss == pytest.approx(math.log(classes), rel=1e-6)
    assert (uniform.top1, uniform.top5) == (0.1, 0.5)
    assert uniform.ece == pytest.approx(0, abs=1e-7)


def test_top5_of_few_classes_is_one() -> None:
    ours = statistics(*sample(0, 20, 4))
    assert ours.top5 == 1 > ours.top1


def test_loss_is_exact_where_probabilities_underflow() -> None:
    assert statistics(torch.tensor([[0.0, -200.0]]), torch.tensor([1])).loss == 200


def test_no_samples() -> None:
    nothing = statistics(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    np.testing.assert_array_equal(nothing.vector, Statistics.empty().vector)
    assert nothing.n == 0
    assert all(math.isnan(v) for v in (nothing.loss, nothing.top1, nothing.top5, nothing.ece, nothing.mce))


@settings(max_examples=40, deadline=None)
@given(st.lists(samples, max_size=6))
def test_many_at_a_time_have_the_bits_of_one_by_one(drawn: list[tuple[Tensor, Tensor]]) -> None:
    each = [statistics(*data) for data in drawn] + [Statistics.empty()]
    values = metric_values(np.array([one.vector for one in each]))
    for name, column in values.items():
        np.testing.assert_array_equal(column, [getattr(one, name) for one in each])


def test_vector_layout() -> None:
    vector = batch_statistics(*sample(1, 33, 7))
    assert vector.dtype == torch.float64 and vector.shape == (STATISTICS_SIZE,)
    counts, _, hits = vector[4:].reshape(3, NUM_BINS)
    assert counts.sum() == vector[0] == 33
    assert hits.sum() == vector[2]
    copy = Statistics.from_vector(vector)
    vector.zero_()
    assert copy.n == 33
    with pytest.raises(ValueError, match="length 49"):
        Statistics.from_vector(np.zeros(48))


@pytest.mark.parametrize(("clients", "lowest"), [(1, 1), (20, 1), (21, 2), (50, 3), (100, 5), (140, 7)])
def test_worst_clients_are_five_percent_rounded_up(clients: int, lowest: int) -> None:
    values = np.random.default_rng(0).permutation(clients).astype(float)
    assert summarize(values).worst5 == pytest.approx((lowest - 1) / 2)


def test_summary_over_clients() -> None:
    values = np.array([0.2, 0.4, 0.9])
    plain = summarize(values)
    assert plain.mean == pytest.approx(0.5)
    assert plain.std == pytest.approx(values.std(ddof=0))
    weighted, repeated = summarize(values, np.array([1, 2, 3])), summarize(np.repeat(values, [1, 2, 3]))
    assert weighted.mean == pytest.approx(repeated.mean)
    assert weighted.std == pytest.approx(repeated.std)
    assert weighted.worst5 == plain.worst5 == 0.2


def test_a_nan_is_not_hidden() -> None:
    summary = summarize(np.array([0.5, math.nan]))
    assert all(math.isnan(v) for v in (summary.mean, summary.std, summary.worst5))


@pytest.mark.parametrize("huge", [1e200, math.inf])
def test_models_that_diverged_end_no_run(huge: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = summarize(np.array([huge, 1.0]), mode="min")
    assert summary.mean == huge / 2 and summary.worst5 == huge and math.isnan(summary.jain)


@pytest.mark.parametrize(
    ("values", "weights"), [([], None), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([1.0, 2.0], [-1.0, 2.0])]
)
def test_summaries_of_nothing_are_refused(values: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ValueError):
        summarize(np.array(values), None if weights is None else np.array(weights))


@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e12])
def test_the_best_is_found_in_any_unit(unit: float) -> None:
    """Squared errors of small numbers have no digits behind the point, those of large ones none that are exact."""
    errors = {"a": 0.7 * unit, "b": 0.5 * unit, "c": (0.1 + 0.2 + 0.2) * unit, "d": 0.6 * unit}
    assert first_best(errors, "min") == "b" and first_best(dict(reversed(errors.items())), "min") == "c"
    assert first_best({"a": 0.0, "b": unit, "c": -unit}) == "b"
