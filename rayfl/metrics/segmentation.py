"""Classes of pixels or voxels: how masks overlap, how many pixels are right, and the losses of soft masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.language import IGNORED
from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

MaskLoss = Literal["cross_entropy", "dice", "cross_entropy_dice"]

_SMOOTH = 1e-5
"""Keeps the Dice loss finite for a class that a sample has not, as usual (MONAI, nnU-Net)."""

_METRICS: tuple[Metric, ...] = (
    Metric("dice", "Dice", "higher", 100, 2, "%"),
    Metric("iou", "IoU", "higher", 100, 2, "%"),
    Metric("dice_by_sample", "Dice by sample", "higher", 100, 2, "%"),
    Metric("pixel_accuracy", "pixel accuracy", "higher", 100, 2, "%"),
    Metric("loss", "loss", "lower"),
)
_SCALARS = 6


@dataclass(frozen=True)
class SoftMaskLoss:
    """The loss of a sample whose pixels are classified.

    ``cross_entropy`` is the mean over the pixels that count of -log p of their class. ``dice`` is 1 minus the mean over
    classes of 2 sum(p t) / (sum(p) + sum(t)), with sums over the pixels that count, the probability p of the class, and
    t = 1 where the mask has it, else 0 (Milletari et al., 2016, without their squares, as nnU-Net has it).
    ``cross_entropy_dice`` is the sum of both (Isensee et al., 2021). A sample in which no pixel counts has the loss 0.

    Attributes:
        kind: which.
        background: whether class 0 is among the classes of ``dice``.
    """

    kind: MaskLoss = "cross_entropy_dice"
    background: bool = True

    def __call__(self, log_probabilities: Tensor, masks: Tensor) -> Tensor:
        """By sample, shape (n,).

        Args:
            log_probabilities: of shape (n, H, W, C) or (n, H, W, D, C).
            masks: classes, int64 of shape (n, H, W) or (n, H, W, D), ``IGNORED`` where none counts.
        """
        classes = log_probabilities.shape[-1]
        found, truth = log_probabilities.flatten(1, -2), masks.flatten(1)
        has = (truth[..., None] == torch.arange(classes, device=masks.device)).to(found.dtype)
        losses = found.new_zeros(len(truth))
        if self.kind != "dice":
            losses = losses - (found * has).sum((1, 2)) / has.sum((1, 2)).clamp(min=1)
        if self.kind != "cross_entropy":
            counts = (truth != IGNORED).to(found.dtype)[..., None]
            probabilities, first = found.exp() * counts, 0 if self.background else 1
            overlap, size = ((probabilities * one).sum(1)[:, first:] for one in (has, 1))
            shares = (2 * overlap + _SMOOTH) / (size + has.sum(1)[:, first:] + _SMOOTH)
            losses = losses + 1 - shares.mean(1)
        return losses


class SegmentationMeasures(MeasuresBySample):
    """Overlaps of predicted and true masks, from counts of pixels that add up exactly.

    With I pixels of a class in both masks, P in the predicted and T in the true one: ``dice`` is 2 I / (P + T) and
    ``iou`` (Jaccard's index) I / (P + T - I), of all samples' pixels together, mean over the classes that occur in
    either mask. ``dice_by_sample`` is the mean over samples of each sample's ``dice``, without samples in which no such
    class occurs. ``pixel_accuracy`` is the share of pixels whose class is the most probable one. ``loss`` is a mean
    over samples.

    Args:
        classes: C.
        loss: of samples.
        background: whether class 0 is among the classes that overlaps are a mean over.
    """

    metrics = _METRICS

    def __init__(self, classes: int, loss: SoftMaskLoss | None = None, background: bool = True) -> None:
        self.classes, self.background = classes, background
        self._loss = SoftMaskLoss(background=background) if loss is None else loss
        self.size = _SCALARS + 3 * classes

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; log-probabilities (n, H, W[, D], C) and masks (n, H, W[, D]).

        One tensor, float64 of shape (n, ``size``).
        """
        truth, said = targets.flatten(1), predictions.argmax(-1).flatten(1)
        counts = truth != IGNORED
        said = said.where(~predictions[..., 0].flatten(1).isnan(), -1)  # argmax takes NaN for the largest
        hits = (said == truth) & counts
        both, ours, theirs = (
            self._by_class(*pair) for pair in ((truth, hits), (said, counts & (said >= 0)), (truth, counts))
        )
        shares, occurs = self._dice(both, ours + theirs)
        scalars = torch.stack(
            [
                torch.ones_like(shares),
                self._loss(predictions, targets).double(),
                counts.sum(1).double(),
                hits.sum(1).double(),
                occurs.double(),
                shares,
            ],
            1,
        )
        return (torch.cat([scalars, both, ours, theirs], 1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, loss, pixels, hits, having, shares = np.moveaxis(vectors[..., :_SCALARS], -1, 0)
        by_class = vectors[..., _SCALARS:].reshape(*vectors.shape[:-1], 3, self.classes)
        both, ours, theirs = np.moveaxis(by_class[..., 0 if self.background else 1 :], -2, 0)
        occurs = ours + theirs > 0
        dice, iou = ratio(2 * both, ours + theirs, 0), ratio(both, ours + theirs - both, 0)
        return {
            "dice": ratio(dice.sum(-1), occurs.sum(-1)),
            "iou": ratio(iou.sum(-1), occurs.sum(-1)),
            "dice_by_sample": ratio(shares, having),
            "pixel_accuracy": ratio(hits, pixels),
            "loss": ratio(loss, n),
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        if self.background or name == "pixel_accuracy":
            return "no pixel counts"
        return "neither masks nor predictions have a class but the background"

    def _by_class(self, classes: Tensor, counts: Tensor) -> Tensor:
        """Pixels that count by class, float64 of shape (n, C), for classes of shape (n, pixels); they are exact."""
        found = torch.zeros(len(classes), self.classes, dtype=torch.float64, device=classes.device)
        return found.scatter_add_(1, classes.clamp(0, self.classes - 1), counts.double())

    def _dice(self, both: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's mean Dice over the classes that occur (0 where none does), and whether one does."""
        first = 0 if self.background else 1
        both, sizes = both[:, first:], sizes[:, first:]
        occurs = sizes > 0
        shares = (2 * both / sizes.clamp(min=1)).sum(1) / occurs.sum(1).clamp(min=1)
        return shares, occurs.any(1)
