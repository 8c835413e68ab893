"""Oort: clients whose samples are hard and whose devices are fast enough, and new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfl.params import Tree
from rayfl.selection.known import Known
from rayfl.selection.strategy import Asked, Strategy, drawn


class Oort(Strategy):
    """Guided participant selection (Lai, Zhu, Madhyastha, Chowdhury, OSDI 2021, Algorithm 1).

    The statistical utility of a client is n_k sqrt(mean of its samples' squared losses), as it was when the client last
    took part. In round R (1-indexed) a client that has done so in round L_k has the score

        (utility + sqrt(0.1 ln R / L_k)) * (T / D_k)^alpha,   the last factor where its time D_k is above T

    with utilities cut at their 95th percentile. (1 - epsilon) m clients are drawn, in the ratio of scores, among those
    whose score is at least 95 % of the one at place (1 - epsilon) m; the others of the m are new ones, drawn in the
    ratio of their devices' speeds, or uniformly where nothing is simulated. epsilon decays from round to round.

    T moves with ``pacer_step_s``: every W rounds it grows by that much where the utilities of the clients of the last W
    rounds sum to less than those of the W rounds before.

    The paper adds a utility of many units and an uncertainty below one. The authors' code (SymbioticLab/Oort) first
    maps the utilities to [0, 1], by the smallest and by the greatest after the cut; so does ``scaled``.
    """

    name: Literal["oort"] = "oort"
    exploration: float = Field(0.9, ge=0, le=1, description="epsilon in the first round, the share of new clients")
    exploration_decay: float = Field(0.98, gt=0, le=1, description="factor of epsilon from round to round")
    least_exploration: float = Field(0.2, ge=0, le=1, description="the smallest epsilon")
    cut_off: float = Field(0.95, ge=0, le=1, description="c, share of the last score that is enough to be drawn")
    clip: float = Field(0.95, gt=0, le=1, description="quantile of utilities at which higher ones are cut")
    scaled: bool = Field(True, description="map utilities to [0, 1] before the uncertainty is added (authors' code)")
    preferred_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="T, simulated seconds above which a client counts less; null: no client is too slow",
    )
    penalty: float = Field(2.0, ge=0, allow_inf_nan=False, description="alpha, the exponent of T / D_k")
    pacer_step_s: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="seconds by which T grows when utilities fall; 0: T stays"
    )
    pacer_rounds: int = Field(20, ge=1, description="W, rounds whose utilities are compared with those before")
    most_rounds: int | None = Field(
        None, ge=1, description="rounds after which a client is no longer chosen, while others are there; null: never"
    )

    @model_validator(mode="after")
    def _pace_of_something(self) -> Oort:
        if self.pacer_step_s and self.preferred_s is None:
            raise ValueError("pacer_step_s moves preferred_s: give that, too, or leave pacer_step_s out")
        if self.least_exploration > self.exploration:
            raise ValueError(
                f"least_exploration is {self.least_exploration:g}, above exploration, {self.exploration:g}"
            )
        return self

    @property
    def asked(self) -> Asked:
        return "cohort"

    def choose(self, known: Known) -> np.ndarray:
        able = self._fresh(known)
        scores = self.scores(known)
        explored = able[~np.isnan(scores[able])]
        new = np.setdiff1d(able, explored)
        epsilon = max(self.exploration * self.exploration_decay**known.round, self.least_exploration)
        wanted = min(int((1 - epsilon) * known.size + 1e-9), len(explored))
        wanted = max(wanted, known.size - len(new))  # nobody new is left
        order = explored[np.argsort(-scores[explored], kind="stable")]
        found = []
        if wanted:
            enough = self.cut_off * scores[order[wanted - 1]]
            pool = order[(scores[order] >= enough) | (np.arange(len(order)) < wanted)]
            found.append(drawn(known.generator, pool, scores[pool], wanted))
        if wanted < known.size:
            seconds = np.where(np.isnan(known.seconds[new]), 1.0, known.seconds[new])
            found.append(drawn(known.generator, new, 1 / np.maximum(seconds, 1e-9), known.size - wanted))
        return np.concatenate(found)

    def scores(self, known: Known) -> np.ndarray:
        """The score of each client, float64; nan for those that have not taken part."""
        told = (known.times > 0) & np.isfinite(known.squares)
        found = np.full(len(known.samples), np.nan)
        if not told.any():
            return found
        utilities = _utilities(known)[told]
        most = float(np.quantile(utilities, self.clip))
        utilities = np.minimum(utilities, most)
        if self.scaled:
            least = float(utilities.min())
            utilities = (utilities - least) / ((most - least) or 1.0)
        uncertainty = np.sqrt(0.1 * np.log(known.round + 1) / (known.last[told] + 1))
        found[told] = utilities + uncertainty
        preferred = self._preferred_s(known)
        if preferred is not None:
            seconds = known.seconds[told]
            slow = seconds > preferred
            found[np.flatnonzero(told)[slow]] *= (preferred / seconds[slow]) ** self.penalty
        return found

    def own_after(self, known: Known, cohort: Sequence[int], updates: Mapping[int, Tensor]) -> Tree:
        if not self.pacer_step_s:
            return {}
        told = [client for client in cohort if np.isfinite(known.squares[client])]
        total = float(_utilities(known)[told].sum()) if told else 0.0
        before = known.own.get("utilities", torch.zeros(0, dtype=torch.float64))
        history = torch.cat([before, torch.tensor([total], dtype=torch.float64)])[-2 * self.pacer_rounds :]
        preferred, rounds = self._preferred_s(known), known.round + 1
        assert preferred is not None
        if rounds % self.pacer_rounds == 0 and len(history) == 2 * self.pacer_rounds:
            earlier, later = history[: self.pacer_rounds], history[self.pacer_rounds :]
            preferred += self.pacer_step_s if float(earlier.sum()) > float(later.sum()) else 0.0
        return {"utilities": history, "preferred_s": torch.tensor(preferred, dtype=torch.float64)}

    def _preferred_s(self, known: Known) -> float | None:
        moved = known.own.get("preferred_s")
        return self.preferred_s if moved is None else float(moved)

    def _fresh(self, known: Known) -> np.ndarray:
        """Returns the clients that may still be chosen; those of the fewest rounds where too few are left."""
        if self.most_rounds is None:
            return known.able
        order = known.able[np.argsort(known.times[known.able], kind="stable")]
        left = int((known.times[order] < self.most_rounds).sum())
        return np.sort(order[: max(left, known.size)])


def _utilities(known: Known) -> np.ndarray:
    """The statistical utility of each client: n_k sqrt(mean squared loss); nan where it is not known."""
    utilities: np.ndarray = known.samples * np.sqrt(known.squares)
    return utilities
