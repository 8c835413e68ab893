"""Robust rules that first choose, or mix, the messages of which another rule or a mean is then taken."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from rayfl.aggregation import mixing, robust
from rayfl.aggregation.exact_sum import Weighted
from rayfl.messages.aggregation_rule import NOTHING, Known, Messages, Received, Rule, equal_shares, trees_of
from rayfl.messages.aggregators import (
    Bulyan,
    CenteredClipping,
    DivideAndConquer,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormBounding,
    TrimmedMean,
)
from rayfl.params import Tree


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Then = Annotated[
    Mean | Median | TrimmedMean | Krum | Bulyan | GeometricMedian | NormBounding | CenteredClipping | DivideAndConquer,
    Field(discriminator="name"),
    BeforeValidator(_named),
]


class _Mixing(Rule):
    """What mixes messages and gives them to another rule."""

    weighs: ClassVar[bool] = False

    name: str
    then: Then = Field(
        Median(),
        description="the rule that the mixed messages are given to, each of which counts alike: a name, or a section "
        "as this one",
    )

    @abstractmethod
    def shares(self, products: Tensor, known: Known) -> Tensor:
        """Returns the coefficients of each mixed message, a row each, of the messages' inner products."""

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        shares = self.shares(robust.inner_products(trees, received), known)
        mixed = [Weighted(tree, 1) for tree in mixing.mixed(trees, received, shares)]
        # nobody's message any more, and another seed: else what is drawn would depend on who was mixed with whom
        return self.then.combine(mixed, received, replace(known, clients=(), seed=known.seed + 1))

    def memory_after(self, messages: Messages, received: Received, known: Known, found: Tree) -> Tree:
        return self.then.memory_after(messages, received, known, found)


class NearestNeighborMixing(_Mixing):
    """Another rule, of messages each replaced by the mean of its nearest (NNM: Allouah et al., AISTATS 2023)."""

    name: Literal["nnm"] = "nnm"
    malicious: int = Field(ge=0, description="f: a message becomes the mean of its n - f nearest ones, itself included")

    @property
    def least(self) -> int:
        return max(self.then.least, 2 * self.malicious + 1)

    def shares(self, products: Tensor, known: Known) -> Tensor:
        return mixing.nearest_shares(products, self.malicious)


class Bucketing(_Mixing):
    """Another rule, of the means of buckets of messages, drawn in each round (Karimireddy et al., ICLR 2022)."""

    name: Literal["bucketing"] = "bucketing"
    size: int = Field(2, ge=1, description="s, how many messages a bucket has")

    @property
    def least(self) -> int:
        return (self.then.least - 1) * self.size + 1

    def shares(self, products: Tensor, known: Known) -> Tensor:
        generator = np.random.Generator(np.random.Philox(known.seed))
        return mixing.bucket_shares(len(products), self.size, generator)


class Flame(Rule):
    """The mean of a majority of alike messages, clipped, with noise (FLAME: Nguyen et al., USENIX Security 2022)."""

    weighs: ClassVar[bool] = False

    name: Literal["flame"] = "flame"
    compare: Literal["models", "changes"] = Field(
        "models", description="what cosines are of: what clients send (the paper), or how it differs from what they got"
    )
    noise: float = Field(
        0.001,
        ge=0,
        allow_inf_nan=False,
        description="lambda: the noise's standard deviation in multiples of the median norm of the changes; 0: none",
    )

    @property
    def least(self) -> int:
        return 3

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        products = robust.inner_products(trees, received)
        compared = products if self.compare == "changes" else robust.inner_products(trees, _nothing(received))
        chosen = mixing.majority(compared)
        norms = products.diagonal().clamp(min=0).sqrt()
        most = robust.middle(norms.sort().values)
        taken = equal_shares(len(chosen)) * torch.where(norms > most, most / norms, 1.0)[chosen]
        found = robust.combined([trees[i] for i in chosen], received, taken)
        generator = np.random.Generator(np.random.Philox(known.seed))
        return mixing.with_noise(found, self.noise * float(most), generator)


def _nothing(received: Received) -> Mapping[str, Tensor]:
    return {path: torch.zeros(()) for path in received}
