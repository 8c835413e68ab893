"""Overlaps of masks against torchmetrics, losses of masks against PyTorch's and a sum over pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from torchmetrics.segmentation import DiceScore

from rayfl.metrics import Statistics
from rayfl.metrics.language import IGNORED
from rayfl.metrics.segmentation import SegmentationMeasures, SoftMaskLoss

torch.set_num_threads(1)


def masks(seed: int, n: int, sides: tuple[int, ...], classes: int, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Log-probabilities and masks, some of whose pixels do not count and some of whose classes do not occur."""
    generator = torch.Generator().manual_seed(seed)
    most = int(torch.randint(1, classes + 1, (), generator=generator))
    y = torch.randint(most, (n, *sides), generator=generator)
    logits = 2 * F.one_hot(y, classes) + 1.5 * torch.randn(n, *sides, classes, generator=generator)
    y[torch.rand(y.shape, generator=generator) < ignored] = IGNORED
    return logits.log_softmax(-1), y


def scored(measures: SegmentationMeasures, predictions: Tensor, y: Tensor) -> dict[str, float]:
    return Statistics.from_vector(measures.statistics(predictions, y), measures).metrics()


def overlap(said: Tensor, truth: Tensor, classes: int, background: bool) -> float:
    """torchmetrics' macro Dice of pixels, as of one sample."""
    level: Any = "global"
    score = DiceScore(
        classes, include_background=background, average="macro", aggregation_level=level, input_format="index"
    )
    return score(said[None], truth[None]).item()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from([(5, 4), (3, 4, 2)]),
    st.integers(2, 5),
    st.booleans(),
)
def test_overlaps_are_those_of_torchmetrics(
    seed: int, n: int, sides: tuple[int, ...], classes: int, background: bool
) -> None:
    predictions, y = masks(seed, n, sides, classes)
    found = scored(SegmentationMeasures(classes, background=background), predictions, y)
    said, counts = predictions.argmax(-1), y != IGNORED
    if not counts.any():
        assert math.isnan(found["dice"]) and math.isnan(found["pixel_accuracy"])
        return
    expected = overlap(said[counts], y[counts], classes, background)
    assert found["dice"] == pytest.approx(expected, abs=1e-6, nan_ok=True)
    rows = [
        overlap(one[own], truth[own], classes, background)
        for one, truth, own in zip(said, y, counts, strict=True)
        if own.any()
    ]
    defined = [row for row in rows if not math.isnan(row)]
    expected = sum(defined) / len(defined) if defined else math.nan
    assert found["dice_by_sample"] == pytest.approx(expected, abs=1e-6, nan_ok=True)
    right = MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED)(said, y)
    assert found["pixel_accuracy"] == pytest.approx(right.item(), abs=1e-6)
    if background:
        jaccard = MulticlassJaccardIndex(classes, average="macro", ignore_index=IGNORED)(said, y)
        assert found["iou"] == pytest.approx(jaccard.item(), abs=1e-6)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("sides", [(5, 4), (3, 4, 2)])
def test_losses_are_means_over_samples_of_their_pixels(sides: tuple[int, ...], background: bool) -> None:
    predictions, y = masks(4, 6, sides, 3)
    own = predictions.movedim(-1, 1)
    cross_entropy = torch.stack(
        [F.nll_loss(one[None], mask[None], ignore_index=IGNORED) for one, mask in zip(own, y, strict=True)]
    )
    dice = []
    for one, mask in zip(own.exp(), y, strict=True):
        counts = mask != IGNORED
        shares = []
        for label in range(0 if background else 1, 3):
            p, t = one[label][counts], (mask[counts] == label).float()
            shares.append((2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5))
        dice.append(1 - sum(shares) / len(shares))
    expected = {"cross_entropy": cross_entropy, "dice": torch.stack(dice)}
    expected["cross_entropy_dice"] = expected["cross_entropy"] + expected["dice"]
    for kind, values in expected.items():
        loss = SoftMaskLoss(kind, background)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(predictions, y), values)
        found = scored(SegmentationMeasures(3, loss, background), predictions, y)
        assert found["loss"] == pytest.approx(values.mean().item(), rel=1e-5)


def test_a_mask_in_which_no_pixel_counts_has_no_loss_and_no_overlap() -> None:
    predictions, y = masks(0, 2, (3, 3), 3)
    nothing = torch.full_like(y, IGNORED)
    for kind in ("cross_entropy", "dice", "cross_entropy_dice"):
        loss = SoftMaskLoss(kind)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(predictions, nothing), torch.zeros(2), atol=1e-6, rtol=0)
    measures = SegmentationMeasures(3)
    found = scored(measures, predictions, nothing)
    assert all(math.isnan(found[name]) for name in ("dice", "iou", "dice_by_sample", "pixel_accuracy"))
    assert "no pixel counts" in measures.undefined("dice")
    alone = torch.zeros(1, 3, 3, dtype=torch.int64)
    sure = (100 * F.one_hot(alone, 3)).float().log_softmax(-1)
    without = SegmentationMeasures(3, background=False)
    assert math.isnan(scored(without, sure, alone)["dice"]) and "but the background" in without.undefined("dice")
    assert scored(without, sure, alone)["pixel_accuracy"] == 1
