"""TiFL: the clients of a round are of one tier, so that nobody fast waits for somebody slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfl.params import Tree
from rayfl.selection.known import Known
from rayfl.selection.strategy import Asked, Strategy, drawn


class TiFL(Strategy):
    """Clients of one tier of speed (Chai et al., HPDC 2020, Algorithm 2, and the static policies of Section 4.2).

    Clients are sorted by the time of a round on their simulated devices, and cut into m tiers of the same size. Each
    round has one tier, drawn by the tiers' shares among those that have a credit left, and its clients are drawn
    uniformly from that tier. With ``shares`` these are fixed. Else all are 1/m at first. Every I rounds, from 2 I on,
    if the tier of the last round is no better than I rounds before, the one at place i of n tiers with credits, from
    the worst to the best, gets the share

        (n - i) / (n (n - 1) / 2),    i = 1..n

    so that the best gets none. A tier is the better, the smaller the mean of its clients' losses is, each as its client
    told it when it last took part; one that has told nothing is the worst. The paper goes by accuracies on test data.
    """

    name: Literal["tifl"] = "tifl"
    tiers: int = Field(5, ge=2, description="m, how many tiers the clients are cut into")
    shares: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = Field(
        None,
        description="how often each tier is chosen, from the fastest to the slowest, up to a factor; null: adapted",
    )
    interval: int = Field(10, ge=1, description="I, rounds after which shares may be adapted")
    credits: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="rounds that each tier may have at most, from the fastest to the slowest; null: any number"
    )

    @model_validator(mode="after")
    def _one_for_each(self) -> TiFL:
        for name, values in (("shares", self.shares), ("credits", self.credits)):
            if values is not None and len(values) != self.tiers:
                raise ValueError(
                    f"{name} has {len(values)} numbers, but there are {self.tiers} tiers: give one for each"
                )
            if values is not None and not any(values):
                raise ValueError(f"{name} are all 0: no tier could be chosen")
        if self.shares is not None and self.interval != type(self).model_fields["interval"].default:
            raise ValueError("interval is for shares that are adapted: leave shares or interval out")
        if self.shares and self.credits and not any(map(min, self.shares, self.credits)):
            raise ValueError("no tier has both a share and a credit: no tier could be chosen")
        return self

    @property
    def asked(self) -> Asked:
        return "cohort" if self.shares is None else "nobody"

    def tier_of(self, known: Known) -> np.ndarray:
        """The tier of each client, from 0, the fastest; int64."""
        places = np.argsort(np.argsort(known.seconds, kind="stable"), kind="stable")
        return places * self.tiers // len(places)

    def choose(self, known: Known) -> np.ndarray:
        tier_of, weights = self.tier_of(known), self._shares(known) * (self._credits(known) > 0)
        there = np.bincount(tier_of[known.able], minlength=self.tiers) > 0
        # where no tier that may be chosen has anybody who can be asked, one that has
        weights = weights * there if (weights * there).any() else there.astype(np.float64)
        (tier,) = drawn(known.generator, np.arange(self.tiers), weights, 1)
        among = known.able[tier_of[known.able] == tier]
        return drawn(known.generator, among, np.ones(len(among)), known.size)

    def own_after(self, known: Known, cohort: Sequence[int], updates: Mapping[int, Tensor]) -> Tree:
        if not cohort:
            return known.own
        tier, credits = int(self.tier_of(known)[cohort[0]]), self._credits(known)
        credits[tier] -= 1
        own: Tree = {} if self.credits is None else {"credits": torch.from_numpy(credits)}
        if self.shares is not None:
            return own
        shares, losses = self._shares(known), self._losses(known)
        before = known.own.get("losses")
        if (known.round + 1) % self.interval == 0:
            if before is not None and not losses[tier] < float(before[tier]):
                shares = _ranked(losses, credits > 0)
            before = torch.from_numpy(losses)
        return {**own, "shares": torch.from_numpy(shares), **({} if before is None else {"losses": before})}

    def _shares(self, known: Known) -> np.ndarray:
        kept = known.own.get("shares")
        if kept is not None and self.shares is None:
            return np.array(kept, np.float64)
        return np.array(self.shares or [1 / self.tiers] * self.tiers, np.float64)

    def _credits(self, known: Known) -> np.ndarray:
        """How many rounds each tier may still have, int64."""
        kept = known.own.get("credits")
        if kept is not None and self.credits is not None:
            return np.array(kept, np.int64)
        return np.array(self.credits or [np.iinfo(np.int64).max] * self.tiers, np.int64)

    def _losses(self, known: Known) -> np.ndarray:
        """The mean of the clients' losses of each tier, float64; infinite where none is known."""
        found, tier_of = np.full(self.tiers, math.inf), self.tier_of(known)
        for tier in range(self.tiers):
            losses = known.losses[tier_of == tier]
            if np.isfinite(losses).any():
                found[tier] = losses[np.isfinite(losses)].mean()
        return found


def _ranked(losses: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """The shares of tiers by their losses, the greatest first; 0 for those that are not usable.

    Args:
        losses: of each tier.
        usable: whether a tier may still be chosen.
    """
    shares = np.zeros(len(losses))
    order = np.flatnonzero(usable)
    order = order[np.argsort(-losses[order], kind="stable")]
    count = len(order)
    shares[order] = 1.0 if count == 1 else (count - 1 - np.arange(count)) / (count * (count - 1) / 2)
    return shares
