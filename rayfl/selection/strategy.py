"""What strategies of choosing a round's clients have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rayfl.params import Tree
from rayfl.selection.known import Known

Asked = Literal["nobody", "cohort", "candidates"]
"""Whose losses a strategy needs: nobody's; the cohort's, for later rounds; those of candidates, before the choice."""


class Strategy(BaseModel):
    """How the clients of a round are chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def asked(self) -> Asked:
        """Returns whose losses are found in a round."""
        return "nobody"

    @property
    def numbers(self) -> int:
        """Returns how many numbers a client tells of its losses."""
        return 1

    @property
    def repeats(self) -> bool:
        """Returns whether a client may count several times in the mean of a round."""
        return False

    @property
    def needs_updates(self) -> bool:
        """Returns whether the server must keep how each client last changed the model."""
        return False

    def candidates_of(self, known: Known) -> np.ndarray:
        """Returns the clients whose losses are found before the choice; these are ``able`` in :meth:`choose`."""
        return known.able

    @abstractmethod
    def choose(self, known: Known) -> np.ndarray:
        """Returns the clients of the round, in any order: of ``known.able``, at most ``known.size`` different ones.

        A client that is there r times counts r times in the mean, which only a strategy with :attr:`repeats` may want.
        """

    def own_after(self, known: Known, cohort: Sequence[int], updates: Mapping[int, Tensor]) -> Tree:
        """Returns what the strategy itself remembers after a round.

        Args:
            known: with the losses of the round.
            cohort: who has taken part.
            updates: by client of the cohort, how it has changed the parameters, (P,); none without
                :attr:`needs_updates`.
        """
        return known.own


def drawn(generator: np.random.Generator, clients: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """Different clients, drawn in the ratio of their weights; those without any only once the others are all in.

    Args:
        generator: of the draw.
        clients: among whom.
        weights: of each, 0 or more.
        size: how many; all there are if that is fewer.
    """
    size, weighty = min(size, len(clients)), weights > 0
    first, found = min(size, int(weighty.sum())), []
    if first:
        share = weights[weighty] / weights[weighty].sum()
        found.append(generator.choice(clients[weighty], size=first, replace=False, p=share))
    if first < size:
        found.append(generator.choice(clients[~weighty], size=size - first, replace=False))
    return np.concatenate([clients[:0], *found])


def greatest(known: Known, clients: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The clients with the greatest values, ``known.size`` of them; of equal ones any, at random.

    Args:
        known: of the round.
        clients: among whom.
        values: of all clients; those without (nan) come last.
    """
    own = np.where(np.isnan(values[clients]), -np.inf, values[clients])
    order = np.lexsort((known.generator.random(len(clients)), -own))
    return clients[order[: known.size]]
