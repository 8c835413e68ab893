"""DivFL: a few clients whose updates are near to those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from rayfl.params import Tree
from rayfl.selection.known import Known
from rayfl.selection.silent import waiting, with_silent
from rayfl.selection.strategy import Strategy
from rayfl.selection.updates import distances, heard, with_updates

_ROUNDING = 1e-12
"""By how much sums of the same distances may differ, as a share of them."""


class DivFL(Strategy):
    """Diverse client selection (Balakrishnan, Li, Zhou, Himayat, Smith, Bilmes, ICLR 2022, Algorithm 1).

    The clients S of a round are those that make

        G(S) = sum_k min_{i in S} ||u_k - u_i||

    small, the facility location function of the clients' updates. They are found greedily: one after the other, each
    the one with which G is least. With ``sampled`` each step compares that many clients drawn uniformly (stochastic
    greedy).

    u_k is the last update that client k has sent, a change of the model (the paper's communication-efficient variant).
    The authors' code (melodi-lab/divfl) has all clients send a gradient before the first round; here clients of which
    nothing is known yet are drawn first, uniformly, until there are none. One that was asked n times and has never
    answered is drawn again 2^n rounds later at the earliest.
    """

    name: Literal["divfl"] = "divfl"
    sampled: int | None = Field(
        None, ge=1, description="s, how many clients, drawn uniformly, each greedy step compares; null: all"
    )
    weights: Literal["method", "represented"] = Field(
        "method",
        description="how much a client counts in the mean. method: as the method says; represented: as many times as "
        "there are clients whose nearest chosen one it is (gamma); without effect while there are new clients",
    )

    @property
    def repeats(self) -> bool:
        return self.weights == "represented"

    @property
    def needs_updates(self) -> bool:
        return True

    def choose(self, known: Known) -> np.ndarray:
        all_heard = heard(known.own)
        unheard = np.setdiff1d(known.able, all_heard)
        new = np.setdiff1d(unheard, waiting(known.own, known.round))
        others = np.intersect1d(known.able, all_heard)
        if (missing := known.size - len(new) - len(others)) > 0:  # more are wanted than can be told apart
            late = known.generator.choice(np.setdiff1d(unheard, new), size=missing, replace=False)
            return np.concatenate([new, others, late])
        if len(new) >= known.size:
            return known.generator.choice(new, size=known.size, replace=False)
        apart = distances(known.own, "l2", len(known.samples))
        chosen = self._greedy(known, apart[all_heard], known.size - len(new))
        if len(new) or not self.repeats:
            return np.concatenate([new, chosen])
        rows = apart[np.ix_(all_heard, chosen)]
        rows[all_heard[:, None] == chosen] = -1.0  # a client is always its own nearest one, also if others are equal
        return np.repeat(chosen, np.bincount(rows.argmin(axis=1), minlength=len(chosen)))

    def _greedy(self, known: Known, apart: np.ndarray, size: int) -> np.ndarray:
        """Returns the clients with which G is small, in the order of the choice.

        Args:
            known: of the round.
            apart: from all clients that were heard of (rows) to all (K).
            size: how many.
        """
        left = np.intersect1d(known.able, heard(known.own))
        nearest = np.full(len(apart), np.inf)
        chosen: list[int] = []
        for _ in range(size):
            pool = left
            if self.sampled is not None and self.sampled < len(left):
                pool = np.sort(known.generator.choice(left, size=self.sampled, replace=False))
            totals = np.minimum(nearest[:, None], apart[:, pool]).sum(axis=0)
            # Two clients that are each other's nearest are equally good: rounding must not choose between them.
            best = int(pool[(totals <= totals.min() * (1 + _ROUNDING)).argmax()])
            nearest = np.minimum(nearest, apart[:, best])
            chosen.append(best)
            left = left[left != best]
        return np.array(chosen, np.int64)

    def own_after(self, known: Known, cohort: Sequence[int], updates: Mapping[int, Tensor]) -> Tree:
        kept = with_updates(known.own, updates, "l2", len(known.samples))
        return with_silent(kept, known.own, known.unanswered, set(heard(kept).tolist()), known.round)
