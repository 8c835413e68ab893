"""Bounded contributions and noise, against the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.privacy import clipped, following, limited, noised, reference_of, released
from rayfl.aggregation.tree_noise import Draw
from rayfl.params import Tree, leaves, subtract
from tests.support.toys import assert_close

RECEIVED: Tree = {"weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double(), "bias": torch.tensor([4.0]).double()}
PATHS = dict(leaves(RECEIVED))


def drawn(seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    return lambda path, shape: generator.standard_normal(shape)


def norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for _, leaf in leaves(tree)))


def sent(*numbers: float) -> Tree:
    """What was received, changed by five numbers."""
    change = torch.tensor(numbers, dtype=torch.float64)
    return {"weight": RECEIVED["weight"] + change[:4].reshape(2, 2), "bias": RECEIVED["bias"] + change[4:]}


@given(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5), st.floats(1e-3, 1e3))
def test_a_change_is_scaled_to_the_bound_and_keeps_its_direction(numbers: list[float], bound: float) -> None:
    message = sent(*numbers)
    change, found = subtract(message, RECEIVED), subtract(clipped([message], PATHS, bound)[0][0], RECEIVED)
    factor = min(1, bound / norm(change)) if norm(change) else 1
    assert norm(found) <= bound * (1 + 1e-9) + 1e-12
    assert_close(found, {name: factor * leaf for name, leaf in change.items()}, atol=1e-9)


def test_one_norm_is_over_all_leaves() -> None:
    found = subtract(clipped([sent(3, 0, 0, 0, 4)], PATHS, 1.0)[0][0], RECEIVED)
    assert_close(found, subtract(sent(0.6, 0, 0, 0, 0.8), RECEIVED), atol=1e-12)


@pytest.mark.parametrize(("bound", "within"), [(5.0, True), (4.999, False), (6.0, True)])
def test_a_contribution_says_whether_it_was_within_the_bound(bound: float, within: bool) -> None:
    (found,) = limited([Weighted(sent(3, 0, 0, 0, 4), 1)], PATHS, bound)
    assert found.within is not None and bool(found.within) is within


def moved(bound: float, within: int, count: int, seed: int = 0, **options: float) -> float:
    given: dict[str, Any] = {"quantile": 0.5, "rate": 0.2, "deviation": 0.0, **options}
    return following(bound, within, count, 10, **given, generator=np.random.default_rng(seed))


def test_the_bound_moves_by_the_share_within_it() -> None:
    """The geometric update of Andrew et al. (2021), worked out by hand."""
    assert moved(3.0, 10, 10) == pytest.approx(3 * math.exp(-0.2 * 0.5), rel=1e-15)  # all of them: it shrinks
    assert moved(3.0, 0, 10) == pytest.approx(3 * math.exp(0.2 * 0.5), rel=1e-15)
    assert moved(3.0, 8, 10, quantile=0.8) == pytest.approx(3.0, rel=1e-15)
    assert moved(3.0, 8, 10, quantile=0.3, rate=1.0) == pytest.approx(3 * math.exp(-0.5), rel=1e-15)
    # of six with four within it, (4 - 2) / 2 = 1 more half than not, of 10 expected: 0.5 + 1 / 10
    assert moved(3.0, 4, 6) == pytest.approx(3 * math.exp(-0.2 * 0.1), rel=1e-15)


def test_noise_of_the_count_has_its_deviation_over_the_expected_number() -> None:
    steps = [math.log(moved(1.0, 5, 10, seed, deviation=2.0)) / -0.2 for seed in range(4000)]
    assert np.std(steps) == pytest.approx(2.0 / 10, rel=0.03)
    assert np.mean(steps) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_the_bound_comes_to_the_quantile(quantile: float, bound: float) -> None:
    norms, generator = np.exp(np.random.default_rng(1).normal(size=100)), np.random.default_rng(2)
    bounds = [bound]
    for _ in range(2000):
        cohort = norms[generator.random(100) < 0.5]
        options = {"quantile": quantile, "rate": 0.2, "deviation": 2.5, "generator": generator}
        bounds.append(following(bounds[-1], int((cohort <= bounds[-1]).sum()), len(cohort), 50, **options))
    assert np.mean([(norms <= bound).mean() for bound in bounds[1000:]]) == pytest.approx(quantile, abs=0.03)


@pytest.mark.parametrize(("bound", "within", "rate"), [(1e308, 0, 20.0), (1e-307, 10, 20.0), (1.0, 0, 1e4)])
def test_a_bound_that_is_no_number_is_refused(bound: float, within: int, rate: float) -> None:
    with pytest.raises(OverflowError):
        moved(bound, within, 10, rate=rate)


def test_the_estimate_divides_by_the_expected_number() -> None:
    mean = sent(1, 2, 3, 4, 5)
    found = released(mean, PATHS, count=3, expected=4, deviation=0.0, draw=drawn(0))
    assert_close(found, sent(*(0.75 * number for number in (1, 2, 3, 4, 5))), atol=1e-12)


def test_noise_has_the_deviation_of_the_sum_over_the_expected_number() -> None:
    mean = {"weight": torch.zeros(200, 500), "scale": torch.zeros(())}
    noisy = released(mean, dict(leaves(mean)), 1, expected=5, deviation=2.0, draw=drawn(0))
    assert noisy["weight"].dtype == torch.float32 and noisy["scale"].shape == ()
    assert float(noisy["weight"].std()) == pytest.approx(2 / 5, rel=0.01)
    assert abs(float(noisy["weight"].mean())) < 0.005


def test_a_message_is_a_change_of_what_has_its_names() -> None:
    part = {"weight": RECEIVED["weight"] + 1}
    assert reference_of(part, {"model": RECEIVED, "rate": 1})["weight"] is RECEIVED["weight"]
    assert reference_of({"model": part}, {"model": RECEIVED}).keys() == {"model/weight"}
    with pytest.raises(ValueError, match="sends 'counts', which is no change"):
        reference_of({**part, "counts": torch.ones(2)}, {"model": RECEIVED})
    with pytest.raises(ValueError, match="sends 'bias'"):
        reference_of({"bias": torch.ones(3)}, {"model": RECEIVED})
    with pytest.raises(ValueError, match="sends 'bias'"):
        reference_of({"bias": 1.0}, {"model": RECEIVED})


def test_messages_are_limited_together_as_each_alone() -> None:
    messages = [sent(3, 0, 0, 0, 4), sent(0.1, 0, 0.2, 0, 0), sent(0, 0, 0, 0, 0), sent(-1, 2, -3, 4, -5)]
    for message, group, found in zip(
        messages,
        "abcd",
        limited([Weighted(m, 1, g) for m, g in zip(messages, "abcd", strict=True)], PATHS, 0.5),
        strict=True,
    ):
        (alone,) = limited([Weighted(message, 1)], PATHS, 0.5)
        assert found.group == group
        assert found.within == alone.within
        assert_close(found.tree, alone.tree, atol=1e-14)


def test_noise_is_cut_in_the_order_of_the_leaves() -> None:
    noise = torch.arange(10.0).double().reshape(2, 5)
    for row, found in enumerate(noised([sent(0, 0, 0, 0, 0), sent(1, 1, 1, 1, 1)], 2.0, noise)):
        change = subtract(found, sent(*[row] * 5))
        assert torch.cat([leaf.flatten() for _, leaf in leaves(change)]).tolist() == pytest.approx(
            (2 * noise[row]).tolist()
        )
