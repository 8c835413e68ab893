"""Bounded contributions and noise, against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.privacy import clipped, limited, reference_of, released
from rayfl.params import Tree, leaves, subtract
from tests.support.toys import assert_close

RECEIVED: Tree = {"weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double(), "bias": torch.tensor([4.0]).double()}
PATHS = dict(leaves(RECEIVED))


def norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for _, leaf in leaves(tree)))


def sent(*numbers: float) -> Tree:
    """What was received, changed by five numbers."""
    change = torch.tensor(numbers, dtype=torch.float64)
    return {"weight": RECEIVED["weight"] + change[:4].reshape(2, 2), "bias": RECEIVED["bias"] + change[4:]}


@given(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5), st.floats(1e-3, 1e3))
def test_a_change_is_scaled_to_the_bound_and_keeps_its_direction(numbers: list[float], bound: float) -> None:
    message = sent(*numbers)
    change, found = subtract(message, RECEIVED), subtract(clipped(message, PATHS, bound), RECEIVED)
    factor = min(1, bound / norm(change)) if norm(change) else 1
    assert norm(found) <= bound * (1 + 1e-9) + 1e-12
    assert_close(found, {name: factor * leaf for name, leaf in change.items()}, atol=1e-9)


def test_one_norm_is_over_all_leaves() -> None:
    found = subtract(clipped(sent(3, 0, 0, 0, 4), PATHS, 1.0), RECEIVED)
    assert_close(found, subtract(sent(0.6, 0, 0, 0, 0.8), RECEIVED), atol=1e-12)


def test_the_estimate_divides_by_the_expected_number() -> None:
    mean = sent(1, 2, 3, 4, 5)
    found = released(mean, PATHS, count=3, expected=4, deviation=0.0, generator=np.random.default_rng(0))
    assert_close(found, sent(*(0.75 * number for number in (1, 2, 3, 4, 5))), atol=1e-12)


def test_noise_has_the_deviation_of_the_sum_over_the_expected_number() -> None:
    mean = {"weight": torch.zeros(200, 500), "scale": torch.zeros(())}
    noisy = released(mean, dict(leaves(mean)), 1, expected=5, deviation=2.0, generator=np.random.default_rng(0))
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


def test_a_weight_of_the_clients_own_is_refused() -> None:
    assert limited(Weighted(sent(1, 0, 0, 0, 0), 1, "a"), {"model": RECEIVED}, 0.5).group == "a"
    with pytest.raises(ValueError, match="a weight of 7"):
        limited(Weighted(RECEIVED, 7), {"model": RECEIVED}, 1.0)
