"""Weak and strong changes of one image: a model's answer to the one is what it has to say to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from algorithms.base import Algorithm, setting
from rayfl.data.images.augment import AugmentConfig
from rayfl.engine.updates.batches import epoch_samples, num_steps
from rayfl.engine.updates.settings import TrainConfig


class WeakAndStrong(Algorithm):
    """A method that learns from unlabelled images, by what it is sure of after weak changes.

    Weak changes are those of the section ``augment``; without it images stay as they are. Strong ones come after weak
    ones: operations of RandAugment, and a grey square.
    """

    learns_unlabelled: ClassVar[bool] = True

    threshold: float = setting(
        0.95,
        "tau",
        "probability from which on the model's class of an unlabelled sample counts as its label",
        ge=0,
        le=1,
    )
    operations: int = setting(2, "", "RandAugment operations on a strongly changed image; 0: none", ge=0)
    cutout: float = setting(
        0.5, "", "largest side of the grey square on it, as a share of its width; 0: none", ge=0, le=1
    )

    def strong(self, weak: AugmentConfig) -> AugmentConfig:
        """Returns the strong changes.

        Args:
            weak: the section ``augment``.
        """
        return weak.model_copy(update={"operations": self.operations, "cutout": self.cutout})

    def views(self, weak: AugmentConfig) -> Sequence[AugmentConfig]:
        return weak, self.strong(weak)


def pseudo_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns the likeliest classes, int64 of shape (n,), and whether each is as likely as the threshold asks, bool.

    Args:
        logits: shape (n, C); no gradient flows through them.
        threshold: tau.
    """
    likeliest, classes = logits.detach().softmax(-1).max(-1)
    return classes, likeliest >= threshold


def mean_where(values: Tensor, chosen: Tensor, among: Tensor) -> Tensor:
    """Returns the sum of the values that are chosen over the number of those among which they are; 0 of none.

    Args:
        values: shape (n,).
        chosen: 1 or 0, shape (n,).
        among: 1 or 0, shape (n,).
    """
    return (values * chosen).sum() / among.sum().clamp(min=1)


def paired_samples(train: TrainConfig, labelled: int, unlabelled: int, ratio: int) -> int:
    """Returns how many samples a client's steps on labelled and unlabelled samples process, with repetitions.

    Args:
        train: the training section.
        labelled: n_k.
        unlabelled: how many others.
        ratio: how many of the others a step has for each labelled sample.
    """
    wide = train if train.batch_size is None else train.model_copy(update={"batch_size": ratio * train.batch_size})
    found, steps = wide.samples_in_steps(unlabelled), wide.steps_of(unlabelled)
    if not labelled:
        return found
    once = epoch_samples(labelled, train.batch_size, train.drop_last)
    epochs, rest = divmod(steps, num_steps(labelled, train.batch_size, 1, train.drop_last))
    return found + epochs * once + min(rest * (train.batch_size or labelled), once)
