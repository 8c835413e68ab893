"""FLANDERS: the autoregressive model against plain loops, who is kept, and what is remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.forecasting import floating_size, forecast, in_places
from rayfl.messages.aggregation_rule import Known
from rayfl.messages.aggregator_section import Aggregator
from rayfl.messages.aggregators import CenteredClipping, Krum, Mean, Median
from rayfl.messages.forecasting_rule import Flanders
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal

RECEIVED = {"b": torch.full((3,), 0.5, dtype=torch.float64), "w": torch.ones(2, 4, dtype=torch.float64)}


def tree_of(row: np.ndarray) -> Tree:
    values = torch.from_numpy(row)
    return {"b": values[:3], "w": values[3:].view(2, 4)}


def sent_of(rows: np.ndarray) -> list[Weighted]:
    return [Weighted(tree_of(row), k + 1) for k, row in enumerate(rows)]


def by_loops(past: list[np.ndarray], ridge: float, iterations: int) -> np.ndarray:
    """A and B written out, each from its normal equations, of matrices divided by the root of their mean square."""
    m, n = past[0].shape
    scale = np.sqrt(np.mean([np.mean(x**2) for x in past]))
    xs, b = [x / scale for x in past], np.eye(n)
    for _ in range(iterations):
        above, below = np.zeros((m, m)), ridge * np.eye(m)
        for t in range(1, len(xs)):
            above += xs[t] @ b @ xs[t - 1].T
            below += xs[t - 1] @ b.T @ b @ xs[t - 1].T
        a = above @ np.linalg.inv(below)
        above, below = np.zeros((n, n)), ridge * np.eye(n)
        for t in range(1, len(xs)):
            above += xs[t].T @ a @ xs[t - 1]
            below += xs[t - 1].T @ a.T @ a @ xs[t - 1]
        b = above @ np.linalg.inv(below)
    found: np.ndarray = a @ past[-1] @ b.T
    return found


@pytest.mark.parametrize(("rounds", "ridge", "iterations"), [(2, 1.0, 1), (3, 0.1, 7), (5, 2.0, 30)])
def test_inv_flanders_1_the_forecast_is_that_of_normal_equations(rounds: int, ridge: float, iterations: int) -> None:
    drawn = np.random.default_rng(rounds).normal(size=(rounds, 4, 11))
    found = forecast([torch.from_numpy(one) for one in drawn], ridge, iterations)
    np.testing.assert_allclose(found.numpy(), by_loops([*drawn], ridge, iterations), atol=1e-12)


def test_inv_flanders_2_the_scale_of_messages_makes_no_difference() -> None:
    past = [*torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
    assert_close(forecast([1000 * one for one in past], 0.5, 5), 1000 * forecast(past, 0.5, 5), 1e-9)


def test_inv_flanders_3_a_series_of_the_model_is_foreseen() -> None:
    """X_t = A X_{t-1} B^T without errors, and hardly any ridge."""
    generator = np.random.default_rng(1)
    a, b = (np.linalg.qr(generator.normal(size=(size, size)))[0] for size in (3, 5))
    series = [generator.normal(size=(3, 5))]
    for _ in range(14):
        series.append(a @ series[-1] @ b.T)
    found = forecast([torch.from_numpy(one) for one in series[:-1]], 1e-9, 300)
    np.testing.assert_allclose(found.numpy(), series[-1], atol=1e-5)


def test_of_one_round_or_of_zeros_the_forecast_is_the_last_matrix() -> None:
    one = torch.randn(3, 4, dtype=torch.float64)
    assert forecast([one], 1.0, 5) is one
    assert_equal(forecast([0 * one, 0 * one], 1.0, 5), 0 * one)


def test_numbers_are_taken_from_their_places() -> None:
    row = np.arange(11.0)
    places = torch.tensor([0, 2, 3, 9, 10])
    counted = {**tree_of(row), "count": torch.tensor(7)}  # no direction, and left out
    assert floating_size(counted) == 11
    assert in_places(counted, places, None).tolist() == [0, 2, 3, 9, 10]
    assert in_places(tree_of(row), places, RECEIVED).tolist() == [-0.5, 1.5, 2, 8, 9]


def expected(rows: list[np.ndarray], cohorts: list[list[int]], rule: Flanders, drawn: np.ndarray) -> list[Any]:
    """Who is kept in each round, and the mean of these, with loops over rounds and clients."""
    past: list[tuple[dict[int, np.ndarray], np.ndarray]] = []
    kept_of, means = [], []
    start = np.array([0.5] * 3 + [1.0] * 8)
    for matrix, cohort in zip(rows, cohorts, strict=True):
        seen = matrix - start if rule.series == "changes" else matrix
        kept = list(range(len(cohort)))
        if past:
            window = past[-rule.window :]
            history = [np.stack([own.get(k, found)[drawn] for k in cohort]) for own, found in window]
            ahead = by_loops(history, rule.ridge, rule.iterations) if len(history) > 1 else history[0]
            if rule.distance == "euclidean":
                scores = [float(np.linalg.norm(seen[i][drawn] - ahead[i])) for i in range(len(cohort))]
            else:
                lengths = [float(np.linalg.norm(seen[i][drawn]) * np.linalg.norm(ahead[i])) for i in range(len(cohort))]
                scores = [1 - float(seen[i][drawn] @ ahead[i]) / lengths[i] for i in range(len(cohort))]
            kept = sorted(sorted(kept, key=scores.__getitem__)[: rule.kept])
        weights = np.array([i + 1.0 for i in kept])
        mean = (weights[:, None] * matrix[kept]).sum(0) / weights.sum()
        past.append(({cohort[i]: seen[i] for i in kept}, mean - start if rule.series == "changes" else mean))
        kept_of.append([cohort[i] for i in kept])
        means.append(mean)
    return [kept_of, means]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3, "coordinates": 6, "iterations": 4},
        {"series": "changes", "distance": "cosine", "window": 1, "coordinates": None},
    ],
)
def test_inv_flanders_4_rounds_are_those_of_an_oracle_with_plain_loops(options: dict[str, Any]) -> None:
    rule = Flanders(kept=3, ridge=0.3, **{"iterations": 9, **options})
    generator = np.random.default_rng(4)
    cohorts = [[0, 1, 2, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4, 5], [0, 1, 4, 5]]
    rows = [generator.normal(size=(len(cohort), 11)) for cohort in cohorts]
    drawn = np.arange(11)
    if rule.coordinates == 6:
        drawn = np.sort(np.random.Generator(np.random.Philox(100)).choice(11, size=6, replace=False))
    kept_of, means = expected(rows, cohorts, rule, drawn)
    memory: Tree = {}
    for number, (matrix, cohort) in enumerate(zip(rows, cohorts, strict=True)):
        known, sent = Known(cohort, memory, 100 + number), sent_of(matrix)
        found = rule.combine(sent, RECEIVED, known)
        assert_close(found, tree_of(means[number]), 1e-12)
        memory = rule.memory_after(sent, RECEIVED, known, found)
        rounds = memory["series"]["rounds"]
        assert len(rounds) == min(number + 1, rule.window)
        assert [*rounds[str(len(rounds) - 1)]["clients"]] == [str(client) for client in kept_of[number]]


def test_inv_flanders_5_a_majority_that_sends_something_else_is_dropped() -> None:
    """Clients near one another and still; from the third round on six of nine send noise."""
    generator = np.random.default_rng(0)
    home, memory, rule = generator.normal(size=11), Tree(), Flanders(kept=3)
    for number in range(6):
        rows = home + 0.05 * generator.normal(size=(9, 11))
        if number >= 2:
            rows[:6] += 3 * generator.normal(size=(6, 11))
        known, sent = Known(range(9), memory, number), sent_of(rows)
        found = rule.combine(sent, RECEIVED, known)
        memory = rule.memory_after(sent, RECEIVED, known, found)
        if number >= 2:
            assert rule._chosen(sent, RECEIVED, known) == [6, 7, 8]
            assert np.abs(np.concatenate([found["b"], found["w"].flatten()]) - home).max() < 0.15


def test_keeping_all_is_the_other_rule() -> None:
    rows = np.random.default_rng(2).normal(size=(7, 11))
    for then in (Mean(), Median(), Krum(malicious=2)):
        rule, memory = Flanders(kept=7, then=then), Tree()
        for number in range(3):
            known, sent = Known(range(7), memory, number), sent_of(rows + number)
            assert_equal(rule.combine(sent, RECEIVED, known), then.combine(sent, RECEIVED))
            memory = rule.memory_after(sent, RECEIVED, known, rule.combine(sent, RECEIVED, known))


def test_the_other_rule_keeps_its_own_memory() -> None:
    then = CenteredClipping(radius=0.1)
    rule, sent = Flanders(kept=4, then=then), sent_of(np.random.default_rng(3).normal(size=(6, 11)))
    found = rule.combine(sent, RECEIVED, Known(range(6)))
    memory = rule.memory_after(sent, RECEIVED, Known(range(6)), found)
    assert_equal(memory["then"], {key: found[key] - RECEIVED[key] for key in "bw"})
    again = rule.combine(sent, RECEIVED, Known(range(6), memory, 1))
    kept = [sent[i] for i in rule._chosen(sent, RECEIVED, Known(range(6), memory, 1))]
    assert_equal(again, then.combine(kept, RECEIVED, Known(range(4), memory["then"], 2)))


def test_messages_of_another_size_begin_another_series() -> None:
    rule, rows = Flanders(kept=2, coordinates=5), np.random.default_rng(5).normal(size=(4, 11))
    sent, known = sent_of(rows), Known(range(4), {}, 3)
    memory = rule.memory_after(sent, RECEIVED, known, rule.combine(sent, RECEIVED, known))
    shorter = [Weighted({"b": one.tree["b"]}, 1) for one in sent]
    assert rule._chosen(shorter, RECEIVED, Known(range(4), memory, 4)) == [0, 1, 2, 3]
    found = rule.combine(shorter, RECEIVED, Known(range(4), memory, 4))
    after = rule.memory_after(shorter, RECEIVED, Known(range(4), memory, 4), found)
    assert int(after["series"]["size"]) == 3 and len(after["series"]["rounds"]) == 1


def test_configurations() -> None:
    section: TypeAdapter[Any] = TypeAdapter(Aggregator)
    made = section.validate_python({"name": "flanders", "kept": 9, "then": {"name": "krum", "malicious": 3}})
    assert made == Flanders(kept=9, then=Krum(malicious=3)) and made.least == 9
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kept": 8, "then": {"name": "krum", "malicious": 3}}, "krum needs 9 messages, and 8 are kept"),
        ({}, "kept"),
        ({"kept": 3, "ridge": 0}, "ridge"),
        ({"kept": 3, "then": "flanders"}, "then"),
    ]
    for options, message in refused:
        with pytest.raises(ValidationError, match=message):
            section.validate_python({"name": "flanders", **options})
