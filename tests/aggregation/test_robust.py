"""The rules of robust aggregation against their definitions, and what a minority of messages can do to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import bulyan_choice, inner_products, krum_choice, krum_scores
from rayfl.messages.aggregators import (
    Bulyan,
    CenteredClipping,
    DivideAndConquer,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormBounding,
    Rule,
    TrimmedMean,
)
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal

RECEIVED = {"body/w": torch.tensor([[0.5, -1.0], [2.0, 0.0]]), "b": torch.tensor([0.25])}
RULES = [
    Mean(), Median(), TrimmedMean(malicious=2), Krum(malicious=2), Krum(malicious=2, kept=5), Bulyan(malicious=2),
    GeometricMedian(), CenteredClipping(), CenteredClipping(iterations=3), DivideAndConquer(malicious=2),
    NormBounding(), NormBounding(radius=0.5),
]  # fmt: skip


def messages(n: int = 11, seed: int = 0, spread: float = 1.0) -> list[Weighted]:
    """Returns changes of :data:`RECEIVED` with normal elements, of clients with several weights."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for client in range(n):
        w, b = (RECEIVED[path] + spread * torch.randn(RECEIVED[path].shape, generator=generator) for path in RECEIVED)
        made.append(Weighted({"body": {"w": w}, "b": b}, client + 1))
    return made


def rows(found: list[Weighted]) -> np.ndarray:
    return np.stack([torch.cat([m.tree["body"]["w"].flatten(), m.tree["b"]]).double().numpy() for m in found])


def flat(tree: Tree) -> np.ndarray:
    return torch.cat([tree["body"]["w"].flatten(), tree["b"]]).double().numpy()


def start() -> np.ndarray:
    return torch.cat([leaf.flatten() for leaf in RECEIVED.values()]).double().numpy()


@pytest.mark.parametrize("n", [7, 8])
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(n: int) -> None:
    given = messages(n)
    np.testing.assert_allclose(flat(Median().combine(given, RECEIVED)), np.median(rows(given), 0), atol=1e-6)
    found = flat(TrimmedMean(malicious=2).combine(given, RECEIVED))
    np.testing.assert_allclose(found, stats.trim_mean(rows(given), 2 / n, axis=0), atol=1e-6)


def test_leaves_may_be_single_numbers_or_empty() -> None:
    received = {"scale": torch.tensor(2.0), "none": torch.zeros(0)}
    changes = torch.tensor([0.5, -1.0, 3.0], dtype=torch.float64)
    trees = [{"scale": 2 + change, "none": torch.zeros(0)} for change in changes]
    assert_close(inner_products(trees, received), changes[:, None] * changes, 1e-12)


def distances(points: np.ndarray) -> np.ndarray:
    found: np.ndarray = ((points[:, None] - points[None]) ** 2).sum(-1)
    return found


def test_krum_chooses_by_the_sum_of_distances_to_the_nearest() -> None:
    given = messages(9, seed=3)
    products = inner_products([m.tree for m in given], RECEIVED)
    expected = [np.sort(np.delete(row, k))[: 9 - 3 - 2].sum() for k, row in enumerate(distances(rows(given)))]
    np.testing.assert_allclose(krum_scores(products, 3).numpy(), expected, rtol=1e-6)
    best = int(np.argmin(expected))
    assert_equal(Krum(malicious=3).combine(given, RECEIVED), given[best].tree)
    chosen = sorted(int(k) for k in np.argsort(expected)[:4])
    assert krum_choice(products, 3, 4) == chosen
    several = Krum(malicious=3, kept=4).combine(given, RECEIVED)
    np.testing.assert_allclose(flat(several), rows(given)[chosen].mean(0), atol=1e-6)


def test_bulyan_chooses_one_after_another_and_averages_around_the_median() -> None:
    given = messages(11, seed=5)
    points, left, expected = rows(given), list(range(11)), []
    for _ in range(11 - 2 * 2):
        square = distances(points[left])
        near = max(len(left) - 2 - 2, 1)
        scores = [np.sort(np.delete(row, k))[:near].sum() for k, row in enumerate(square)]
        expected.append(left.pop(int(np.argmin(scores))))
    assert bulyan_choice(inner_products([m.tree for m in given], RECEIVED), 2) == sorted(expected)
    of = points[sorted(expected)]
    middle = np.median(of, 0)
    closest = [
        column[np.argsort(np.abs(column - m), kind="stable")[:3]].mean() for column, m in zip(of.T, middle, strict=True)
    ]
    np.testing.assert_allclose(flat(Bulyan(malicious=2).combine(given, RECEIVED)), closest, atol=1e-6)


def test_geometric_median_has_the_smallest_sum_of_distances() -> None:
    given = messages(9, seed=1)
    points, weights = rows(given), np.array([m.weight for m in given], dtype=float) / 45

    def total(z: np.ndarray) -> float:
        return float(weights @ np.linalg.norm(points - z, axis=1))

    best = optimize.minimize(total, points.mean(0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13})
    found = flat(GeometricMedian(steps=200).combine(given, RECEIVED))
    np.testing.assert_allclose(found, best.x, atol=1e-4)
    # four passes are between the mean, where they begin, and the end
    assert total(found) <= total(flat(GeometricMedian().combine(given, RECEIVED))) < total(weights @ points)


@pytest.mark.parametrize("radius", [None, 0.5, 100.0])
def test_long_changes_are_scaled_down(radius: float | None) -> None:
    given = messages(8, seed=2)
    changes = rows(given) - start()
    norms = np.linalg.norm(changes, axis=1)
    most = np.median(norms) if radius is None else radius
    weights = np.array([m.weight for m in given], dtype=float) / 36
    expected = start() + (weights * np.minimum(1, most / norms)) @ changes
    found = flat(NormBounding(radius=radius).combine(given, RECEIVED))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    if radius == 100:
        assert_close(NormBounding(radius=radius).combine(given, RECEIVED), Mean().combine(given, RECEIVED), atol=1e-6)


@pytest.mark.parametrize("rule", RULES[:-1], ids=str)
def test_equal_messages_give_that_message(rule: Rule) -> None:
    one = messages(1)[0]
    assert_equal(rule.combine([Weighted(one.tree, k + 1) for k in range(11)], RECEIVED), one.tree)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_unchanged_model_stays(rule: Rule) -> None:
    still = {"body": {"w": RECEIVED["body/w"]}, "b": RECEIVED["b"]}
    assert_equal(rule.combine([Weighted(still, 1)] * 11, RECEIVED), still)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [1e3, -1e6])
def test_two_of_eleven_far_away_move_every_rule_but_the_mean_little(rule: Rule, size: float) -> None:
    given = messages(11, spread=0.1)
    honest = rows(given)[:9]
    for k in (9, 10):
        tree: Tree = {"body": {"w": torch.full((2, 2), size)}, "b": torch.full((1,), size * (k - 8))}
        given[k] = Weighted(tree, 1)
    moved = np.linalg.norm(flat(rule.combine(given, RECEIVED)) - honest.mean(0))
    if isinstance(rule, Mean):
        assert moved > 10
    else:
        assert moved < (0.8 if isinstance(rule, NormBounding) else 0.5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Bulyan)], ids=str)
def test_the_order_of_clients_makes_no_difference(rule: Rule) -> None:
    # of two that are each other's nearest, which have the same score, Bulyan takes the first
    given = messages(11, seed=9)
    found = flat(rule.combine(given, RECEIVED))
    for order in (list(range(11))[::-1], [3, 9, 0, 10, 5, 7, 2, 8, 1, 6, 4]):
        np.testing.assert_allclose(flat(rule.combine([given[k] for k in order], RECEIVED)), found, atol=1e-6)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(malicious=2), Bulyan(malicious=2)], ids=str)
def test_coordinates_stay_within_those_of_the_honest(rule: Rule) -> None:
    given = messages(11, seed=7)
    honest = rows(given)[:9]
    for k, size in ((9, torch.inf), (10, 1e30)):
        given[k] = Weighted({"body": {"w": torch.full((2, 2), min(size, 1e30))}, "b": torch.full((1,), -1e30)}, 1)
    found = flat(rule.combine(given, RECEIVED))
    assert (honest.min(0) - 1e-6 <= found).all() and (found <= honest.max(0) + 1e-6).all()


def test_krum_never_chooses_one_that_is_far_away() -> None:
    for seed, size in itertools.product(range(5), (5.0, 1e8)):
        given = messages(9, seed=seed, spread=0.1)
        for k in (0, 4, 8):  # each far from all others
            given[k] = Weighted({"body": {"w": torch.full((2, 2), size * (k + 1))}, "b": torch.zeros(1)}, 1)
        products = inner_products([m.tree for m in given], RECEIVED)
        assert not {0, 4, 8} & set(krum_choice(products, 3, 6))


def test_how_many_messages_a_rule_needs() -> None:
    assert [rule.least for rule in RULES] == [1, 1, 5, 7, 7, 11, 1, 1, 1, 5, 1, 1]
    assert Krum(malicious=0, kept=20).least == 20
    assert DivideAndConquer(malicious=2, filtered=2.6).least == 7


def test_results_have_the_types_of_the_messages() -> None:
    half = {path: leaf.to(torch.bfloat16) for path, leaf in RECEIVED.items()}
    given = [Weighted({"body": {"w": half["body/w"] + k}, "b": half["b"].double() * k}, 1) for k in range(11)]
    mixed: dict[str, Tensor] = {**half, "b": half["b"].double()}
    for rule in RULES[1:]:
        found = rule.combine(given, mixed)
        assert found["body"]["w"].dtype == torch.bfloat16 and found["b"].dtype == torch.float64
