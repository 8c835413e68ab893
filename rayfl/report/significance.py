"""Paired tests between methods: are their differences on the same clients, or for the same seeds, more than chance?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.stats import rankdata, wilcoxon

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
        left_out: number of further pairs, in no test: one of the two methods alone has no number there.
        larger: 1 if by the signed ranks the first has the larger values, -1 if the second has, 0 for neither.
    """

    first: str
    second: str
    pairs: int
    wins: int
    losses: int
    difference: float
    p: float
    adjusted: float
    left_out: int
    larger: int

    @property
    def significant(self) -> bool:
        """Returns whether the adjusted p-value is below :data:`LEVEL`."""
        return self.adjusted < LEVEL


def signed_rank(differences: np.ndarray) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test (Wilcoxon, 1945): are differences symmetric about 0?

    Zeros are left out. Exact for up to 50 pairs without equal differences, by scipy's choice otherwise.

    Args:
        differences: one per pair, or numbers in the same order as them, shape (n,).

    Returns:
        1 where all differences are zero.
    """
    return float(wilcoxon(differences[differences != 0]).pvalue) if differences.any() else 1.0


def ordered(pairs: np.ndarray) -> np.ndarray:
    """Returns the differences of pairs, first minus second, as whole numbers in the same order.

    Each is rounded by the size of its own pair: one large value makes no other difference a tie. Infinite differences
    are the largest; between equal infinities there is none.

    Args:
        pairs: without nan, shape (n, 2).

    Returns:
        0 for ties, else the place of the absolute difference with the difference's sign, float of shape (n,); equal
        differences have equal places.
    """
    differences = _differences(pairs)
    sizes = np.abs(pairs).max(1)
    unsure = np.where(np.isfinite(sizes), sizes, 0.0) * 10.0**-_DIGITS
    absolute = np.abs(differences)
    order = np.argsort(absolute, kind="stable")
    low, high = order[:-1], order[1:]
    larger = absolute[high] > absolute[low] + np.maximum(unsure[low], unsure[high])
    places = np.empty(len(order))
    places[order] = np.cumsum([1, *larger])
    found: np.ndarray = np.where(absolute > unsure, np.sign(differences) * places, 0.0)
    return found


def _differences(pairs: np.ndarray) -> np.ndarray:
    first, second = np.asarray(pairs, dtype=float).T
    # Infinities minus each other are nan, also where they are equal; finite values may have an infinite difference.
    with np.errstate(invalid="ignore", over="ignore"):
        found: np.ndarray = np.where(first == second, 0.0, first - second)
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
    known = [(one, other, pairs, ~np.isnan(pairs)) for one, other, pairs in tests if len(pairs)]
    found = [(one, other, pairs[there.all(1)], there) for one, other, pairs, there in known if there.all(1).any()]
    ranked = [ordered(pairs) for _, _, pairs, _ in found]
    p_values = [signed_rank(ranks) for ranks in ranked]
    with np.errstate(invalid="ignore"):  # both infinities in one mean
        means = [float(_differences(pairs).mean()) for _, _, pairs, _ in found]
    return [
        PairTest(
            first=one,
            second=other,
            pairs=len(pairs),
            wins=int((ranks > 0).sum()),
            losses=int((ranks < 0).sum()),
            difference=mean,
            p=p,
            adjusted=adjusted,
            left_out=int((there.sum(1) == 1).sum()),
            larger=_larger(ranks),
        )
        for (one, other, pairs, there), ranks, mean, p, adjusted in zip(
            found, ranked, means, p_values, holm(p_values), strict=True
        )
    ]


def _larger(ranks: np.ndarray) -> int:
    """Returns the sign of the sum of signed ranks, ties left out."""
    kept = ranks[ranks != 0]
    return int(np.sign((np.sign(kept) * rankdata(np.abs(kept))).sum()))


def left_out(tests: Sequence[PairTest], what: str) -> list[str]:
    """Returns a sentence for each test without some pairs, in which one method alone has no number.

    Args:
        tests: on one kind of pairs.
        what: the pairs are: clients or seeds.
    """
    return [
        f"the test of {test.first} with {test.second} leaves out {test.left_out} of {test.pairs + test.left_out} "
        f"{what}: only one of the two has a number there"
        for test in tests
        if test.left_out
    ]


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
    values = np.asarray(rows[metric].to_numpy(zero_copy_only=False), dtype=float)
    return dict(zip(rows["client"].to_pylist(), values.tolist(), strict=True))


def _mean(run: Run, metric: str) -> float:
    key = shown_key(run)
    value = None if key is None else final_by_key(run)[key][metric]
    return float("nan") if value is None else float(value)
