"""The section aggregator of a configuration: how the server makes one message of those of a round's clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rayfl.aggregation import robust
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.params import Tree

_Messages = Sequence[Weighted]
_Received = Mapping[str, Tensor]

_MALICIOUS = Field(ge=0, description="f, how many messages of a round may be of malicious clients")


class Rule(BaseModel):
    """How one message is made of several.

    Class attributes:
        weighs: whether the method's weights of clients count; else all clients count alike.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weighs: ClassVar[bool] = True

    @property
    def least(self) -> int:
        """Returns how many messages the rule needs."""
        return 1

    @abstractmethod
    def combine(self, messages: _Messages, received: _Received) -> Tree:
        """Returns one message, in the types of those that are given.

        Args:
            messages: of one structure, :attr:`least` at least, by ascending client.
            received: by path, what they are changes of.
        """


class Mean(Rule):
    """The weighted mean, exactly rounded."""

    name: Literal["mean"] = "mean"

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        total = ExactSum()
        for message in messages:
            total.add(message)
        return total.mean()


class Median(Rule):
    """The median of each coordinate (Yin et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["median"] = "median"

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        return robust.coordinatewise(_trees(messages), robust.middle)


class TrimmedMean(Rule):
    """The mean of each coordinate without its lowest and highest values (Yin et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["trimmed_mean"] = "trimmed_mean"
    malicious: int = Field(ge=0, description="f, how many values are left out at each end of each coordinate")

    @property
    def least(self) -> int:
        return 2 * self.malicious + 1

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        return robust.coordinatewise(_trees(messages), lambda ordered: robust.trimmed(ordered, self.malicious))


class Krum(Rule):
    """The messages that have the nearest neighbours (Blanchard et al., NeurIPS 2017)."""

    weighs: ClassVar[bool] = False

    name: Literal["krum"] = "krum"
    malicious: int = _MALICIOUS
    kept: int = Field(1, ge=1, description="m, how many messages the mean is of; more than 1: Multi-Krum")

    @property
    def least(self) -> int:
        return max(2 * self.malicious + 3, self.kept)

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        trees = _trees(messages)
        chosen = robust.krum_choice(robust.inner_products(trees, received), self.malicious, self.kept)
        return robust.combined([trees[i] for i in chosen], received, _equal(len(chosen)))


class Bulyan(Rule):
    """The mean of the values nearest the median, among messages that Krum chooses (El Mhamdi et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["bulyan"] = "bulyan"
    malicious: int = _MALICIOUS

    @property
    def least(self) -> int:
        return 4 * self.malicious + 3

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        trees = _trees(messages)
        chosen = robust.bulyan_choice(robust.inner_products(trees, received), self.malicious)
        count = len(chosen) - 2 * self.malicious
        return robust.coordinatewise([trees[i] for i in chosen], lambda ordered: robust.around_middle(ordered, count))


class GeometricMedian(Rule):
    """The point with the smallest weighted sum of distances to the messages (RFA: Pillutla et al., IEEE TSP 2022)."""

    name: Literal["geometric_median"] = "geometric_median"
    steps: int = Field(4, ge=1, description="T, passes of the smoothed Weiszfeld algorithm")
    smoothing: float = Field(1e-6, gt=0, allow_inf_nan=False, description="nu, the least distance that is divided by")

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        trees = _trees(messages)
        products = robust.inner_products(trees, received)
        found = robust.geometric_median(products, _shares(messages), self.steps, self.smoothing)
        return robust.combined(trees, received, found)


class NormBounding(Rule):
    """The weighted mean of changes that are scaled down to a radius (Sun et al., arXiv 1911.07963)."""

    name: Literal["norm_bounding"] = "norm_bounding"
    radius: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="the largest Euclidean norm of a change; null: the median of the norms in the round",
    )

    def combine(self, messages: _Messages, received: _Received) -> Tree:
        trees = _trees(messages)
        found = robust.bounded(robust.inner_products(trees, received), _shares(messages), self.radius)
        return robust.combined(trees, received, found)


Aggregator = Annotated[
    Mean | Median | TrimmedMean | Krum | Bulyan | GeometricMedian | NormBounding, Field(discriminator="name")
]


def _trees(messages: _Messages) -> list[Tree]:
    return [message.tree for message in messages]


def _equal(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def _shares(messages: _Messages) -> Tensor:
    weights = torch.tensor([float(message.weight) for message in messages], dtype=torch.float64)
    return weights / weights.sum()
