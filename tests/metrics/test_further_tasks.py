"""Mergeable statistics of all tasks against torchmetrics and scikit-learn, and how parts add up."""

from __future__ import annotations

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import torchmetrics.classification as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from torch import Tensor
from torchmetrics.regression import R2Score
from torchmetrics.text import Perplexity

from rayfl.metrics import Measures, MeasuresBySample, Statistics
from rayfl.metrics.classification import CLASSIFICATION, STATISTICS_SIZE, ClassificationMeasures
from rayfl.metrics.language import IGNORED, LanguageMeasures
from rayfl.metrics.multilabel import MultilabelMeasures
from rayfl.metrics.regression import RegressionMeasures
from rayfl.metrics.segmentation import SegmentationMeasures
from rayfl.metrics.thresholds import levels
from tests.metrics.test_segmentation import masks

torch.set_num_threads(1)
THRESHOLDS = 101


def squared(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions - targets).square()


def scored(measures: Measures, predictions: Tensor, targets: Tensor) -> dict[str, float]:
    return Statistics.from_vector(measures.statistics(predictions, targets), measures).metrics()


def numbers(seed: int, n: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = 3 * torch.randn(n, outputs, generator=generator) + 5
    return y + torch.randn(n, outputs, generator=generator), y


def labels(seed: int, n: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, count, generator=generator) < 0.4).float()
    return 2 * (y - 0.5) + 1.5 * torch.randn(n, count, generator=generator), y


def classes(seed: int, n: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(count, (n,), generator=generator)
    logits = 2 * torch.nn.functional.one_hot(y, count) + 1.5 * torch.randn(n, count, generator=generator)
    return logits.log_softmax(1), y


def tokens(seed: int, n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(vocabulary, (n, length), generator=generator)
    y[torch.rand(n, length, generator=generator) < 0.3] = IGNORED
    y[0, 0] = 1
    return torch.randn(n, length, vocabulary, generator=generator).log_softmax(-1), y


CASES = {
    "regression": (RegressionMeasures(3, squared), *numbers(0, 60, 3)),
    "multilabel": (MultilabelMeasures(4, THRESHOLDS), *labels(0, 60, 4)),
    "language_model": (LanguageMeasures(), *tokens(0, 60, 7, 9)),
    "segmentation": (SegmentationMeasures(4), *masks(0, 60, (3, 4), 4)),
    "classification": (
        ClassificationMeasures(
            ("f1_macro", "top1_by_frequency", "auroc"), 5, THRESHOLDS, groups=np.array([0, 2, 1, 0, 2])
        ),
        *classes(0, 60, 5),
    ),
}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 80), st.integers(1, 4))
def test_regression_is_that_of_scikit_learn_and_torchmetrics(seed: int, n: int, outputs: int) -> None:
    predictions, y = numbers(seed, n, outputs)
    found = scored(RegressionMeasures(outputs, squared), predictions, y)
    exact, guessed = y.double().numpy(), predictions.double().numpy()
    assert found["mse"] == pytest.approx(mean_squared_error(exact, guessed), rel=1e-9)
    assert found["mae"] == pytest.approx(mean_absolute_error(exact, guessed), rel=1e-9)
    assert found["r2"] == pytest.approx(r2_score(exact, guessed), rel=1e-6, abs=1e-9)
    if (exact.var(0) * n).min() > 1e-3:  # torchmetrics takes targets that hardly differ for equal ones
        assert found["r2"] == pytest.approx(R2Score()(predictions.double(), y.double()).item(), rel=1e-6, abs=1e-9)
    assert found["loss"] == pytest.approx(found["mse"], rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 1e-3, 0.1, 1.0, 12345.678, 1e6])
@pytest.mark.parametrize("n", [1, 2, 33, 1000])
def test_r2_is_undefined_where_targets_are_the_same_and_only_there(value: float, n: int) -> None:
    y = torch.full((n, 1), value)
    measures = RegressionMeasures(1, squared)
    assert math.isnan(scored(measures, y + 1, y)["r2"])
    # Sums of mini-batches leave round-off where one sum leaves none.
    batches = [Statistics.from_vector(measures.statistics(part + 1, part), measures) for part in y.split(7)]
    assert math.isnan(sum(batches, Statistics.empty(measures)).metrics()["r2"])
    if n > 1:
        y[0] += 0.01 * max(value, 1)
        expected = r2_score(y.double().numpy(), (y + 1).double().numpy())
        assert scored(RegressionMeasures(1, squared), y + 1, y)["r2"] == pytest.approx(expected, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(1, 6))
def test_multilabel_is_that_of_torchmetrics(seed: int, n: int, count: int) -> None:
    logits, y = labels(seed, n, count)
    found, truth = scored(MultilabelMeasures(count, THRESHOLDS), logits, y), y.long()
    if count > 1:
        for average in ("micro", "macro"):
            f1 = oracle.MultilabelF1Score(count, average=average)(logits.sigmoid(), truth)
            assert found[f"f1_{average}"] == pytest.approx(f1.item(), abs=1e-6)
            ours = f1_score(truth.numpy(), (logits > 0).numpy(), average=average, zero_division=0)
            assert found[f"f1_{average}"] == pytest.approx(ours, abs=1e-9)
        exact = oracle.MultilabelExactMatch(count)(logits.sigmoid(), truth)
        assert found["exact_match"] == pytest.approx(exact.item(), abs=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_label = oracle.MultilabelAveragePrecision(
                count, average="none", thresholds=levels(THRESHOLDS, 0).float()
            )
            areas = by_label(logits.sigmoid(), truth)[y.sum(0) > 0]
        assert found["map"] == pytest.approx(areas.mean().item(), abs=1e-5, nan_ok=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_positive_weights_are_in_the_loss() -> None:
    logits, y = labels(1, 20, 2)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, pos_weight=torch.tensor([2.0, 5.0]))
    found = scored(MultilabelMeasures(2, THRESHOLDS, (2.0, 5.0)), logits, y)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(30, 120), st.integers(2, 6))
def test_macro_f1_and_auroc_are_those_of_torchmetrics(seed: int, n: int, count: int) -> None:
    log_probabilities, y = classes(seed, n, count)
    y[:count] = torch.arange(count)  # torchmetrics counts a class without samples as 0
    found = scored(ClassificationMeasures(("f1_macro", "auroc"), count, THRESHOLDS), log_probabilities, y)
    f1 = oracle.MulticlassF1Score(count, average="macro")(log_probabilities, y)
    at = levels(THRESHOLDS, -math.log(count - 1)).float()
    area = oracle.MulticlassAUROC(count, thresholds=at)(log_probabilities.exp(), y)
    assert found["f1_macro"] == pytest.approx(f1.item(), abs=1e-6)
    assert found["auroc"] == pytest.approx(area.item(), abs=1e-5)


def test_outputs_of_no_class_are_no_class_of_auroc_and_f1() -> None:
    log_probabilities, y = classes(0, 60, 5)
    unused = torch.full((60, 2), -math.inf)
    names = ("f1_macro", "auroc")
    found, expected = (
        scored(ClassificationMeasures(names, 5, THRESHOLDS), said, y)
        for said in (torch.cat([log_probabilities, unused], 1), log_probabilities)
    )
    assert [found[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize("count", [2, 4])
def test_auroc_of_sure_models_is_that_of_scikit_learn(count: int) -> None:
    """A model that has learned its few samples by heart gives probabilities of 0 and 1, right or wrong."""
    predictions, y = classes(0, 200, count)
    sure = (200 * predictions).log_softmax(1)
    assert float((sure.exp() == 1).double().mean()) > 0.8 / count
    found = scored(ClassificationMeasures(("auroc",), count, THRESHOLDS), sure, y)
    reached = torch.bucketize(sure.exp(), levels(THRESHOLDS, -math.log(count - 1)).float(), right=True)
    area = np.mean([roc_auc_score(y == label, reached[:, label]) for label in range(count)])
    assert found["auroc"] == pytest.approx(area, abs=1e-6)
    same = torch.tensor([[200.0] + [0.0] * (count - 1)]).expand(200, count).log_softmax(1)
    assert scored(ClassificationMeasures(("auroc",), count, THRESHOLDS), same, y)["auroc"] == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("count", [2, 10])
def test_auroc_and_precision_are_near_to_the_exact_ones(count: int, scale: float) -> None:
    """Of models that have hardly begun to learn, and of sure ones; evenly spaced probabilities miss some by 0.07."""
    generator = torch.Generator().manual_seed(count)
    y = torch.randint(count, (500,), generator=generator)
    logits = scale * (torch.randn(500, count, generator=generator) + 1.5 * torch.nn.functional.one_hot(y, count))
    said = logits.log_softmax(1)
    exact = np.mean([roc_auc_score(y == label, said[:, label]) for label in range(count)])
    assert scored(ClassificationMeasures(("auroc",), count), said, y)["auroc"] == pytest.approx(exact, abs=0.02)
    has = torch.nn.functional.one_hot(y, count)
    logits = scale * (torch.randn(500, count, generator=generator) + 2 * has - 1)
    exact = np.mean([average_precision_score(has[:, label], logits[:, label]) for label in range(count)])
    # Ties have the lowest precision among them, which counts most where precisions differ by luck alone.
    near = 0.06 if scale == 0.05 else 0.02
    assert scored(MultilabelMeasures(count), logits, has.float())["map"] == pytest.approx(exact, abs=near)


@pytest.mark.parametrize("count", [4, 10, 100])
def test_of_equal_classes_macro_f1_takes_the_one_that_accuracy_takes(count: int) -> None:
    measures = ClassificationMeasures(["f1_macro"], count)
    undecided = torch.zeros(1, count).log_softmax(1)
    vectors = [measures.statistics(undecided, torch.tensor([label])).numpy() for label in range(count)]
    found = measures.values(np.stack(vectors))
    assert found["top1"].sum() == 1
    assert found["f1_macro"].tolist() == found["top1"].tolist()


def test_further_metrics_leave_those_of_classification_as_they_are() -> None:
    measures, predictions, y = CASES["classification"]
    plain, more = CLASSIFICATION.statistics(predictions, y), measures.statistics(predictions, y)
    assert torch.equal(more[:STATISTICS_SIZE], plain)
    found = Statistics.from_vector(more, measures).metrics()
    assert {name: found[name] for name in Statistics.from_vector(plain).metrics()} == pytest.approx(
        Statistics.from_vector(plain).metrics(), rel=0
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 9), st.integers(2, 12))
def test_language_is_that_of_torchmetrics(seed: int, n: int, length: int, vocabulary: int) -> None:
    predictions, y = tokens(seed, n, length, vocabulary)
    found = scored(LanguageMeasures(), predictions, y)
    perplexity = Perplexity(ignore_index=IGNORED)(predictions, y).item()
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    counted = y != IGNORED
    assert found["token_accuracy"] == pytest.approx((predictions.argmax(-1) == y)[counted].double().mean().item())
    rows = zip(predictions.argmax(-1), y, counted, strict=True)
    exact = [torch.equal(said[asked], targets[asked]) for said, targets, asked in rows if asked.any()]
    assert found["exact_match"] == pytest.approx(np.mean(exact))


@pytest.mark.parametrize("task", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_parts_add_up_in_any_division(task: str, seed: int) -> None:
    """Counts are exact; sums of losses agree to the last bits, and to the bit where parts are added in one order."""
    measures, predictions, y = CASES[task]
    cuts = sorted(np.random.default_rng(seed).integers(0, len(y) + 1, size=4).tolist())
    pieces = list(zip([0, *cuts], [*cuts, len(y)], strict=True))
    parts = [Statistics.from_vector(measures.statistics(predictions[i:j], y[i:j]), measures) for i, j in pieces]
    total = sum(parts, Statistics.empty(measures))
    whole = Statistics.from_vector(measures.statistics(predictions, y), measures)
    assert total.n == whole.n == len(y)
    np.testing.assert_allclose(total.vector, whole.vector, rtol=1e-12)
    assert total.metrics() == pytest.approx(whole.metrics(), rel=1e-9)
    assert np.array_equal(sum(parts, Statistics.empty(measures)).vector, total.vector)
    again = pickle.loads(pickle.dumps(total))
    assert again.metrics() == total.metrics()
    assert again.merit == (1 if measures.first.better == "higher" else -1) * again.first


@pytest.mark.parametrize("task", CASES)
def test_padded_sets_of_samples_have_the_sums_of_each(task: str) -> None:
    measures, predictions, y = CASES[task]
    assert isinstance(measures, MeasuresBySample)
    starts, sizes = (0, 20, 51), (20, 31, 9)
    rows = torch.tensor(
        [[start + min(i, size - 1) for i in range(31)] for start, size in zip(starts, sizes, strict=True)]
    )
    mask = torch.arange(31) < torch.tensor(sizes)[:, None]
    together = measures.added([one[rows] for one in measures.by_sample(predictions, y)], mask)
    for vector, start, size in zip(together, starts, sizes, strict=True):
        alone = measures.statistics(predictions[start : start + size], y[start : start + size])
        torch.testing.assert_close(vector, alone, rtol=1e-12, atol=1e-12)


def test_further_metrics_are_the_same_in_any_order() -> None:
    log_probabilities, y = classes(3, 50, 4)
    names = ("f1_macro", "auroc")
    one, other = (
        scored(ClassificationMeasures(order, 4, THRESHOLDS), log_probabilities, y) for order in (names, names[::-1])
    )
    assert {name: one[name] for name in names} == {name: other[name] for name in names}


@pytest.mark.parametrize("task", CASES)
def test_many_sets_at_once_and_none(task: str) -> None:
    measures, predictions, y = CASES[task]
    one, other = (measures.statistics(predictions[i], y[i]) for i in (slice(0, 25), slice(25, 60)))
    vectors = torch.stack([one, other, torch.zeros_like(one)]).numpy()
    found = measures.values(vectors)
    assert found.keys() == {metric.name for metric in measures.metrics}
    for row, vector in enumerate((one, other)):
        single = Statistics.from_vector(vector, measures).metrics()
        assert {name: values[row] for name, values in found.items()} == pytest.approx(single, rel=0)
    assert all(math.isnan(values[2]) for values in found.values())
    assert all(math.isnan(value) for value in Statistics.empty(measures).metrics().values())
