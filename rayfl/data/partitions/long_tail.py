"""A long tail: fewer and fewer training samples from class to class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams

# A product that is meant to be 5 may come out as 4.999999999999999.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Thinned:
    """Which samples are left; the others belong to nobody.

    Attributes:
        kept: ascending indices of those that are divided among clients, int64.
        test: ascending indices of those set aside as a balanced test part, int64.
    """

    kept: np.ndarray
    test: np.ndarray


class LongTail(BaseModel):
    """Pooled samples are thinned out, class by class, before they are divided among clients.

    With IF the imbalance factor and C classes, the c-th class (c = 0, ..., C - 1) keeps

        n_c = floor(n_max IF^(-c / (C - 1)))

    samples (the exponential profile of Cui et al., CVPR 2019), n_max being the largest number for which every class
    has that many: of a balanced data set, the size of its classes. Which ones is drawn; those that a larger factor
    keeps are among those that a smaller one keeps. Classes are the true ones, also with label noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    imbalance_factor: float = Field(
        default=1.0, ge=1, description="IF, samples of the largest class by those of the smallest; 1: all are kept."
    )
    order: Literal["classes", "drawn"] | tuple[int, ...] = Field(
        default="classes",
        description="Classes from the largest to the smallest: by their numbers, drawn by the seed, or a list of all.",
    )
    balanced_test: int = Field(
        default=0,
        ge=0,
        description="Samples of each class that are first set aside; evaluation.official_test and "
        "official_personalized then score on these, and not on a test part that the data set itself has.",
    )
    official_test: Literal["as_is", "long_tailed"] = Field(
        default="as_is",
        description="The data set's official test part: as it is, which is balanced if the data set is; or thinned out "
        "by the same factor, in the same order.",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> LongTail:
        for option, usual in (("order", "classes"), ("official_test", "as_is")):
            if self.imbalance_factor == 1 and getattr(self, option) != usual:
                raise ValueError(f"{option} does nothing with imbalance_factor=1: set a larger one, or drop {option}")
        if self.balanced_test and self.official_test != "as_is":
            raise ValueError("balanced_test takes the place of the official test part: drop it, or official_test")
        return self

    @property
    def active(self) -> bool:
        """Returns whether any sample is left out, or set aside."""
        return self.imbalance_factor > 1 or self.balanced_test > 0

    @property
    def changes_test(self) -> bool:
        """Returns whether the official test part is another one."""
        return self.balanced_test > 0 or self.official_test != "as_is"

    def divided(self, labels: np.ndarray, num_classes: int, streams: RandomStreams) -> Thinned:
        """Divides the samples of a source.

        Args:
            labels: true classes, integers of shape (N,).
            num_classes: C.
            streams: the experiment's randomness; uses the streams ``long_tail`` and ``long_tail.order``.

        Raises:
            ConfigError: the order is not one of these classes.
            DataError: a class has too few samples; names the field to change.
        """
        sizes = np.bincount(labels, minlength=num_classes)
        if self.balanced_test and (least := int(sizes.min())) <= self.balanced_test:
            raise DataError(
                f"long_tail.balanced_test is {self.balanced_test}, but class {int(sizes.argmin())} has only {least} "
                "samples, so that none is left for clients; lower it"
            )
        drawn = self._by_class(labels, num_classes, streams.generator("long_tail"))
        test = [samples[: self.balanced_test] for samples in drawn]
        rest = [samples[self.balanced_test :] for samples in drawn]
        scarce = " left after long_tail.balanced_test; lower one of them" if self.balanced_test else "; lower it"
        return Thinned(self._kept(rest, streams, scarce), _ascending(test))

    def thinned_test(self, labels: np.ndarray, num_classes: int, streams: RandomStreams) -> np.ndarray:
        """The samples of an official test part that are kept with ``official_test=long_tailed``.

        Args:
            labels: true classes, integers of shape (N,).
            num_classes: C.
            streams: the experiment's randomness; uses the streams ``long_tail.test`` and ``long_tail.order``.

        Returns:
            Ascending indices, int64.

        Raises:
            ConfigError: the order is not one of these classes.
            DataError: a class would have no sample.
        """
        scarce = " in the official test part; lower it, or set long_tail.official_test=as_is"
        return self._kept(self._by_class(labels, num_classes, streams.generator("long_tail.test")), streams, scarce)

    def _kept(self, samples: list[np.ndarray], streams: RandomStreams, scarce: str) -> np.ndarray:
        sizes = self.profile(np.array([len(of_class) for of_class in samples]), streams, scarce)
        return _ascending([of_class[:size] for of_class, size in zip(samples, sizes, strict=True)])

    def profile(self, available: np.ndarray, streams: RandomStreams, scarce: str = "; lower it") -> np.ndarray:
        """How many samples each class keeps.

        Args:
            available: how many it has, integers of shape (C,).
            streams: the experiment's randomness; uses the stream ``long_tail.order``.
            scarce: of which samples a class has too few, and what to change; the end of the error's message.

        Returns:
            int64 of shape (C,).

        Raises:
            ConfigError: the order is not one of these classes.
            DataError: a class would have no sample.
        """
        if self.imbalance_factor == 1:
            return available.astype(np.int64)
        classes = len(available)
        if classes < 2:
            raise ConfigError("long_tail.imbalance_factor needs two classes at least, and the data have one")
        order = self._order(classes, streams)
        shares = self.imbalance_factor ** (-np.arange(classes) / (classes - 1))
        largest = available[order] / shares
        sizes = np.empty(classes, dtype=np.int64)
        sizes[order] = np.floor(largest.min() * shares + _ROUNDING)
        if not sizes.all():
            empty, least = (int(order[place]) for place in (np.argmin(sizes[order]), np.argmin(largest)))
            raise DataError(
                f"long_tail.imbalance_factor is {self.imbalance_factor:g}, which leaves class {empty} no sample, since "
                f"class {least} has only {int(available[least])}{scarce}"
            )
        return sizes

    def _order(self, classes: int, streams: RandomStreams) -> np.ndarray:
        if self.order == "classes":
            return np.arange(classes)
        if self.order == "drawn":
            return streams.generator("long_tail.order").permutation(classes)
        if sorted(self.order) != list(range(classes)):
            raise ConfigError(
                f"long_tail.order is {list(self.order)}, but must name each of the classes 0 to {classes - 1} once"
            )
        return np.array(self.order, dtype=np.int64)

    @staticmethod
    def _by_class(labels: np.ndarray, num_classes: int, generator: np.random.Generator) -> list[np.ndarray]:
        """The samples of each class, in drawn order, which does not depend on how many are kept."""
        drawn = generator.permutation(len(labels))
        return [drawn[labels[drawn] == label] for label in range(num_classes)]


def _ascending(parts: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(parts)).astype(np.int64, copy=False)
