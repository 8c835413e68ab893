"""What a method says about training samples without labels (section ``labelled``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rayfl.data.images.augment import AugmentConfig
from rayfl.engine.updates.settings import TrainConfig


class UnlabelledSamples:
    """The part of a method's contract that semi-supervised learning needs.

    Class attributes:
        learns_unlabelled: whether clients learn from samples without labels, too (``Client.unlabelled``). If not, they
            train on the labelled ones alone.
        learns_without_labels: whether clients may have no labels at all (``labelled.at=server``).
    """

    learns_unlabelled: ClassVar[bool] = False
    learns_without_labels: ClassVar[bool] = False

    def views(self, weak: AugmentConfig) -> Sequence[AugmentConfig]:
        """Returns the changes of images that ``RoundContext.views`` makes of each sample; none by default.

        Args:
            weak: the section ``augment``.
        """
        return ()

    def samples_in_steps(self, train: TrainConfig, labelled: int, unlabelled: int) -> int:
        """Returns how many samples a client's local steps process, with repetitions, for simulated devices.

        Args:
            train: the section.
            labelled: n_k.
            unlabelled: the client's training samples without labels.
        """
        return train.samples_in_steps(labelled)
