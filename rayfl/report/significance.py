"""Paired tests between methods: are their differences on the same clients, or for the same seeds, more than chance?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.stats import wilcoxon

from rayfl.report.grouping import Group
from rayfl.report.rows import client_rows, final_by_key, shown_key
from rayfl.runs.loading import Run

LEVEL = 0.05
"""Adjusted p-values below it are called significant."""
_DIGITS = 12
"""Equal differences of values are equal to this number of the values' digits, though not to the last bit."""


@dataclass(frozen=True)
class PairTest:
    """Two methods compared on one kind of pairs.

    Attributes:
        first: label of a group.
        second: label of another.
        pairs: number of pairs.
        wins: pairs in which the first has the larger value.
        losses: pairs in which the second has the larger value; the other pairs are ties.
        difference: mean difference of the metric, first minus second.
        p: two-sided p-value of Wilcoxon's signed-rank test, ties left out.
        adjusted: the same after Holm's correction for all tests on this kind of pairs.
    """

    first: str
    second: str
    pairs: int
    wins: int
    losses: int
    difference: float
    p: float
    adjusted: float

    @property
    def significant(self) -> bool:
        """Returns whether the adjusted p-value is below :data:`LEVEL`."""
        return self.adjusted < LEVEL


def signed_rank(differences: np.ndarray, size: float = 1.0) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test (Wilcoxon, 1945): are differences symmetric about 0?

    Zeros are left out. Exact for up to 50 pairs without equal differences, by scipy's choice otherwise.

    Args:
        differences: one per pair, shape (n,).
        size: of the largest value that they are differences of: what is smaller by twelve digits is zero.

    Returns:
        1 where all differences are zero.
    """
    rounded = _rounded(differences, size)
    return float(wilcoxon(rounded[rounded != 0]).pvalue) if rounded.any() else 1.0


def _rounded(differences: np.ndarray, size: float) -> np.ndarray:
    """Differences in units of the values' size, to :data:`_DIGITS`."""
    found: np.ndarray = np.round(np.asarray(differences, dtype=float) / size, _DIGITS)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm, 1979): the family-wise error of all tests together is kept.

    Args:
        p_values: of all tests of a family.

    Returns:
        Adjusted p-values in the same order, at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    stepped = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors))
    result = np.empty(len(p_values))
    result[order] = stepped
    return result.tolist()


def over_clients(groups: Sequence[Group], metric: str = "top1") -> list[PairTest]:
    """Tests of all pairs of groups; a pair of numbers is the metric of two methods on one client of one seed.

    Only seeds that both have, with the same partition, and clients that both have evaluated. The numbers are those of
    the row that stands for the run: the method's personalized model, which is never chosen on test data, unless
    another was asked for.

    Args:
        groups: the methods.
        metric: a column of ``clients.parquet``.
    """
    values = {group.label: {run.seed: _by_client(run, metric) for run in group.runs} for group in groups}
    tests = []
    for one, other in combinations(groups, 2):
        pairs = [
            (values[one.label][seed][client], values[other.label][seed][client])
            for seed in _shared_seeds(one, other)
            for client in sorted(values[one.label][seed].keys() & values[other.label][seed].keys())
        ]
        tests.append((one.label, other.label, np.array(pairs)))
    return _tested(tests)


def over_seeds(groups: Sequence[Group], metric: str = "top1") -> list[PairTest]:
    """Tests of all pairs of groups with at least two seeds in common; a pair is two means over clients.

    Args:
        groups: the methods.
        metric: a column of ``rounds.parquet``.
    """
    values = {group.label: {run.seed: _mean(run, metric) for run in group.runs} for group in groups}
    tests = []
    for one, other in combinations(groups, 2):
        seeds = _shared_seeds(one, other)
        if len(seeds) >= 2:
            pairs = [(values[one.label][seed], values[other.label][seed]) for seed in seeds]
            tests.append((one.label, other.label, np.array(pairs)))
    return _tested(tests)


def _tested(tests: Sequence[tuple[str, str, np.ndarray]]) -> list[PairTest]:
    known = [(one, other, pairs[np.isfinite(pairs).all(1)]) for one, other, pairs in tests if len(pairs)]
    found = [(one, other, pairs[:, 0] - pairs[:, 1], _size(pairs)) for one, other, pairs in known if len(pairs)]
    p_values = [signed_rank(d, size) for _, _, d, size in found]
    return [
        PairTest(
            one,
            other,
            len(d),
            int((_rounded(d, size) > 0).sum()),
            int((_rounded(d, size) < 0).sum()),
            float(d.mean()),
            p,
            adjusted,
        )
        for (one, other, d, size), p, adjusted in zip(found, p_values, holm(p_values), strict=True)
    ]


def _size(values: np.ndarray) -> float:
    """The largest absolute value; 1 where all are zero."""
    return float(np.abs(values).max()) or 1.0


def _shared_seeds(one: Group, other: Group) -> list[int]:
    left, right = one.by_seed, other.by_seed
    return [
        seed
        for seed in sorted(left.keys() & right.keys())
        if left[seed].partition_hash and left[seed].partition_hash == right[seed].partition_hash
    ]


def _by_client(run: Run, metric: str) -> Mapping[int, float]:
    key = shown_key(run)
    rows = None if key is None else client_rows(run, key)
    if rows is None:
        return {}
    pairs = zip(rows["client"].to_pylist(), rows[metric].to_pylist(), strict=True)
    return {client: value for client, value in pairs if value is not None}


def _mean(run: Run, metric: str) -> float:
    key = shown_key(run)
    value = None if key is None else final_by_key(run)[key][metric]
    return float("nan") if value is None else float(value)
