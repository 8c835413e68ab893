"""Clustered sampling: one client from each of m distributions, such that the mean of the drawn is unbiased."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import scipy
from pydantic import Field, model_validator
from torch import Tensor

from rayfl.params import Tree
from rayfl.selection.known import Known
from rayfl.selection.strategy import Strategy
from rayfl.selection.updates import Metric, distances, with_updates


class Clustered(Strategy):
    """Clustered sampling (Fraboni, Vidal, Kameni, Lorenzi, ICML 2021, Algorithms 1 and 2).

    One client is drawn from each of m distributions r_1, ..., r_m over clients, with

        sum_i r_{k,i} = 1    and    sum_k r_{k,i} = m p_i,    p_i = n_i / sum_j n_j,

    and the new model is the plain mean of the m drawn ones, in which client i then has the expected weight p_i. A
    client that is drawn from several distributions trains once and counts as often as it is drawn, which is the same.

    ``by=size`` (Algorithm 1): clients in the order of their sizes, the largest first, fill the distributions one after
    the other. ``by=updates`` (Algorithm 2): Ward's hierarchical clustering of the clients' last updates; the tree is
    cut into the largest groups with sum p_i <= 1/m; the m largest groups each begin a distribution, and clients of the
    others fill them up. Probabilities are whole numbers of samples, so that they are exact.

    A client with p_i > 1/m has as many distributions to itself as it fills; under Algorithm 2 only the rest of it is
    clustered.
    """

    name: Literal["clustered"] = "clustered"
    by: Literal["size", "updates"] = Field(
        "size",
        description="what distributions are made of. size: the clients' numbers of samples (Algorithm 1); updates: how "
        "alike their last updates are (Algorithm 2)",
    )
    similarity: Metric = Field(
        "arccos",
        description="of by=updates: arccos, the angle between two updates; l2, their Euclidean distance; l1, the sum "
        "of absolute differences",
    )

    @model_validator(mode="after")
    def _similarity_of_something(self) -> Clustered:
        if self.by == "size" and self.similarity != "arccos":
            raise ValueError("similarity is about updates: set by=updates, or leave similarity out")
        return self

    @property
    def repeats(self) -> bool:
        return True

    @property
    def needs_updates(self) -> bool:
        return self.by == "updates"

    def choose(self, known: Known) -> np.ndarray:
        table = self.distributions(known)
        drawn = known.generator.integers(table[0].sum(), size=len(table))
        places = [
            int(np.searchsorted(np.cumsum(row), one, side="right")) for row, one in zip(table, drawn, strict=True)
        ]
        return known.able[places]

    def distributions(self, known: Known) -> np.ndarray:
        """The m distributions over ``known.able``, in samples: (m, n), int64; each row sums to those of all."""
        samples, count = known.samples[known.able], known.size
        table = np.zeros((count, len(samples)), np.int64)
        if self.by == "size":
            _fill(table, np.argsort(-samples, kind="stable"), count * samples, int(samples.sum()))
            return table
        return self._by_updates(known, table)

    def _by_updates(self, known: Known, table: np.ndarray) -> np.ndarray:
        samples = known.samples[known.able]
        capacity = int(samples.sum())
        alone, masses = np.divmod(len(table) * samples, capacity)
        taken = 0
        for client in np.flatnonzero(alone):
            table[taken : taken + alone[client], client] = capacity
            taken += int(alone[client])
        left = np.flatnonzero(masses)
        if taken == len(table):
            return table
        apart = distances(known.own, self.similarity, len(known.samples))[np.ix_(known.able[left], known.able[left])]
        groups = [left[group] for group in _groups(apart, masses[left], capacity)]
        groups.sort(key=lambda group: (-int(masses[group].sum()), int(group[0])))
        first = groups[: len(table) - taken]
        for row, group in zip(table[taken:], first, strict=True):
            row[group] = masses[group]
        rest = [int(client) for group in groups[len(first) :] for client in group]
        _fill(table[taken:], rest, masses, capacity)
        return table

    def own_after(self, known: Known, cohort: Sequence[int], updates: Mapping[int, Tensor]) -> Tree:
        if self.by == "size":
            return known.own
        return with_updates(known.own, updates, self.similarity, len(known.samples))


def _fill(table: np.ndarray, clients: Iterable[int], masses: np.ndarray, capacity: int) -> None:
    """Puts clients into distributions, in place: each into the first that have room, in parts where one has too little.

    Args:
        table: (m, n).
        clients: in this order.
        masses: how much of each client is to be put there, by client.
        capacity: what a distribution holds.
    """
    row, room = 0, capacity - int(table[0].sum())
    for client in clients:
        mass = int(masses[client])
        while mass:
            while not room:
                row += 1
                room = capacity - int(table[row].sum())
            put = min(mass, room)
            table[row, client] += put
            mass, room = mass - put, room - put


def _groups(apart: np.ndarray, masses: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Cuts the tree of Ward's clustering into the largest groups that a distribution holds; ascending places of each.

    Args:
        apart: distances (n, n).
        masses: of each place; none above ``capacity``.
        capacity: what a distribution holds.
    """
    count = len(masses)
    members, total = [[place] for place in range(count)], masses.tolist()
    condensed = scipy.spatial.distance.squareform(apart, checks=False)
    pairs = scipy.cluster.hierarchy.linkage(condensed, "ward")[:, :2].astype(int) if count > 1 else []
    for one, other in pairs:
        members.append(members[one] + members[other])
        total.append(total[one] + total[other])
    found, open_nodes = [], [len(members) - 1]
    while open_nodes:
        node = open_nodes.pop()
        if total[node] <= capacity:
            found.append(np.sort(np.array(members[node])))
        else:
            open_nodes += pairs[node - count].tolist()
    return found
