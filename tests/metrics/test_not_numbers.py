"""A model whose outputs are NaN is right nowhere, in whatever metric."""

from __future__ import annotations

import numpy as np
import torch

from rayfl.metrics import batch_statistics, metric_values
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.language import LanguageMeasures
from rayfl.metrics.people import cells
from rayfl.metrics.segmentation import SegmentationMeasures

NAN = float("nan")


def test_predictions_that_are_not_numbers_are_wrong() -> None:
    """In PyTorch NaN is the largest number, so that some class would be predicted."""
    sure = torch.eye(6)[torch.tensor([2, 4, 0])].mul(9).log_softmax(1)
    broken = torch.full((6, 6), NAN)
    labels = torch.tensor([2, 4, 0, *range(6)])
    found = metric_values(batch_statistics(torch.cat([sure, broken]), labels).numpy())
    assert found["top1"] == found["top5"] == 3 / 9
    alone = metric_values(batch_statistics(sure, labels[:3]).numpy())
    assert alone["top1"] == 1


def test_nor_are_they_of_a_class() -> None:
    measures = ClassificationMeasures(("f1_macro",), 3)
    predictions = torch.cat([torch.eye(3).mul(9).log_softmax(1), torch.full((3, 3), NAN)])
    vector = measures.added(measures.by_sample(predictions, torch.tensor([0, 1, 2, 0, 1, 2])))
    # of each class one of two samples is found, and nothing is taken for it that is not
    np.testing.assert_allclose(measures.values(vector.numpy())["f1_macro"], 2 / 3)


def test_nor_are_they_for_or_against_people() -> None:
    group, labels, predicted = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), torch.tensor([1, -1, -1])
    assert cells(group, labels, predicted, 2).sum(1).tolist() == [1, 0, 0]


def test_tokens_and_pixels_too() -> None:
    tokens = torch.full((2, 4, 5), NAN)
    language = LanguageMeasures()
    for token in range(5):
        vector = language.added(language.by_sample(tokens, torch.full((2, 4), token)))
        found = language.values(vector.numpy())
        assert found["token_accuracy"] == 0 and found["exact_match"] == 0
    measures = SegmentationMeasures(3)
    for label in range(3):
        vector = measures.added(measures.by_sample(torch.full((1, 2, 2, 3), NAN), torch.full((1, 2, 2), label)))
        found = measures.values(vector.numpy())
        assert found["pixel_accuracy"] == 0 and found["dice"] == 0
