"""Rules of the section aggregator: how the server makes one message of those of a round's clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rayfl.aggregation import robust
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.messages.aggregation_rule import (
    NOTHING,
    Known,
    Messages,
    Received,
    equal_shares,
    fitting,
    shares_of,
    trees_of,
)
from rayfl.messages.aggregation_rule import Rule as Rule
from rayfl.params import Tree, from_leaves, leaves

_MALICIOUS = Field(ge=0, description="f, how many messages of a round may be of malicious clients")


class Mean(Rule):
    """The weighted mean, exactly rounded."""

    name: Literal["mean"] = "mean"

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        total = ExactSum()
        for message in messages:
            total.add(message)
        return total.mean()


class Median(Rule):
    """The median of each coordinate (Yin et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["median"] = "median"

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        return robust.coordinatewise(trees_of(messages), robust.middle)


class TrimmedMean(Rule):
    """The mean of each coordinate without its lowest and highest values (Yin et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["trimmed_mean"] = "trimmed_mean"
    malicious: int = Field(ge=0, description="f, how many values are left out at each end of each coordinate")

    @property
    def least(self) -> int:
        return 2 * self.malicious + 1

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        return robust.coordinatewise(trees_of(messages), lambda ordered: robust.trimmed(ordered, self.malicious))


class Krum(Rule):
    """The messages that have the nearest neighbours (Blanchard et al., NeurIPS 2017)."""

    weighs: ClassVar[bool] = False

    name: Literal["krum"] = "krum"
    malicious: int = _MALICIOUS
    kept: int = Field(1, ge=1, description="m, how many messages the mean is of; more than 1: Multi-Krum")

    @property
    def least(self) -> int:
        return max(2 * self.malicious + 3, self.kept)

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        chosen = robust.krum_choice(robust.inner_products(trees, received), self.malicious, self.kept)
        return robust.combined([trees[i] for i in chosen], received, equal_shares(len(chosen)))


class Bulyan(Rule):
    """The mean of the values nearest the median, among messages that Krum chooses (El Mhamdi et al., ICML 2018)."""

    weighs: ClassVar[bool] = False

    name: Literal["bulyan"] = "bulyan"
    malicious: int = _MALICIOUS

    @property
    def least(self) -> int:
        return 4 * self.malicious + 3

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        chosen = robust.bulyan_choice(robust.inner_products(trees, received), self.malicious)
        count = len(chosen) - 2 * self.malicious
        return robust.coordinatewise([trees[i] for i in chosen], lambda ordered: robust.around_middle(ordered, count))


class GeometricMedian(Rule):
    """The point with the smallest weighted sum of distances to the messages (RFA: Pillutla et al., IEEE TSP 2022)."""

    name: Literal["geometric_median"] = "geometric_median"
    steps: int = Field(4, ge=1, description="T, passes of the smoothed Weiszfeld algorithm")
    smoothing: float = Field(1e-6, gt=0, allow_inf_nan=False, description="nu, the least distance that is divided by")

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        products = robust.inner_products(trees, received)
        found = robust.geometric_median(products, shares_of(messages), self.steps, self.smoothing)
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

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        found = robust.bounded(robust.inner_products(trees, received), shares_of(messages), self.radius)
        return robust.combined(trees, received, found)


class CenteredClipping(Rule):
    """The messages' mean, each clipped to a distance from the last round's result (Karimireddy et al., ICML 2021)."""

    name: Literal["centered_clipping"] = "centered_clipping"
    radius: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="tau, the largest distance from the center; null: the median of the distances",
    )
    iterations: int = Field(1, ge=1, description="L, how often the center moves in a round")
    start: Literal["previous", "received"] = Field(
        "previous",
        description="the first center: previous: the change of the last round's result, which the server keeps; "
        "received: no change",
    )

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        before = fitting(known.memory, received) if self.start == "previous" else {}
        center = {path: leaf.double() + before.get(path, 0) for path, leaf in received.items()}
        trees = [*trees_of(messages), from_leaves(center)]
        products = robust.inner_products(trees, received)
        found = robust.clipped_around(products, shares_of(messages), self.radius, self.iterations)
        return robust.combined(trees, received, found)

    def memory_after(self, messages: Messages, received: Received, known: Known, found: Tree) -> Tree:
        if self.start == "received":
            return {}
        return _beside(known.memory, {path: leaf - received[path] for path, leaf in leaves(found)})


class DivideAndConquer(Rule):
    """The mean without messages that stand out in random coordinates (DnC: Shejwalkar and Houmansadr, NDSS 2021)."""

    weighs: ClassVar[bool] = False

    name: Literal["dnc"] = "dnc"
    malicious: int = _MALICIOUS
    filtered: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="c: messages that are left out in an iteration, in multiples of f"
    )
    coordinates: int = Field(10_000, ge=1, description="b, how many coordinates are drawn in an iteration")
    iterations: int = Field(
        1, ge=1, description="how often coordinates are drawn; messages that were left out least often are kept"
    )

    @property
    def _dropped(self) -> int:
        return math.ceil(self.filtered * self.malicious)

    @property
    def least(self) -> int:
        return max(2 * self.malicious, self._dropped) + 1

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        trees = trees_of(messages)
        generator = np.random.Generator(np.random.Philox(known.seed))
        times = torch.zeros(len(trees), dtype=torch.int64)
        for _ in range(self.iterations):
            products = robust.sampled_products(trees, received, self.coordinates, generator)
            order = robust.outlier_scores(products).sort(stable=True).indices
            times[order[len(trees) - self._dropped :]] += 1
        chosen = (times == times.min()).nonzero()[:, 0].tolist()
        return robust.combined([trees[i] for i in chosen], received, equal_shares(len(chosen)))


class FoolsGold(Rule):
    """The mean weighted by how unlike the sums of a client's changes are to others' (Fung et al., RAID 2020)."""

    weighs: ClassVar[bool] = False

    name: Literal["foolsgold"] = "foolsgold"
    confidence: float = Field(1.0, gt=0, allow_inf_nan=False, description="kappa, the steepness of the logit")

    @property
    def least(self) -> int:
        return 2

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        histories = self._histories(messages, received, known)
        zeros = {path: torch.zeros(()) for path in received}
        rates = robust.similarity_weights(robust.inner_products(histories, zeros), self.confidence)
        return robust.combined(trees_of(messages), received, rates / rates.sum() if rates.any() else rates)

    def memory_after(self, messages: Messages, received: Received, known: Known, found: Tree) -> Tree:
        histories = zip(map(str, known.clients), self._histories(messages, received, known), strict=True)
        changed = {client: _beside(known.memory.get(client, {}), dict(leaves(own))) for client, own in histories}
        return {**known.memory, **changed}

    def _histories(self, messages: Messages, received: Received, known: Known) -> list[Tree]:
        """Returns the sum of each client's changes so far; counters are no direction, and left out."""
        made = []
        for client, message in zip(known.clients, messages, strict=True):
            before, history = fitting(known.memory.get(str(client), {}), received), {}
            for path, leaf in leaves(message.tree):
                if leaf.is_floating_point():
                    total = leaf.double() - received[path].double() + before.get(path, 0)
                    history[path] = total.to(torch.promote_types(leaf.dtype, torch.float32))
            made.append(from_leaves(history))
        return made


def _beside(before: Tree, now: Mapping[str, Tensor]) -> Tree:
    """Returns a memory with what is new of it; tensors that a round did not send stay as they were."""
    return from_leaves({**dict(leaves(before)), **now})
