"""The weighted mean is exact: the same bits for every grouping and order."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.aggregation.contributions import too_large
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.magnitudes import NonFiniteError
from rayfl.errors import MethodError
from rayfl.params import Tree, copy
from tests.support.sums import assert_same_bits, delivered, mean, total, values

torch.set_num_threads(1)


def merged_at_random(parts: list[ExactSum], order: random.Random) -> ExactSum:
    while len(parts) > 1:
        one, other = parts.pop(order.randrange(len(parts))), parts.pop(order.randrange(len(parts)))
        one.merge(other)
        parts.append(one)
    return parts[0]


@st.composite
def replies(draw: Any) -> list[Weighted]:
    """Trees with float32, float64 and number leaves; some elements are equal in all of them."""
    count, seed = draw(st.integers(1, 9)), draw(st.integers(0, 2**20))
    equal = draw(st.booleans())
    trees = []
    for k in range(count):
        wide = values(seed + k, 7, -30, 6, torch.float64)
        wide[:2] = values(seed, 2, -30, 6, torch.float64)
        zeros = torch.tensor([0.0, -0.0, 0.0 if k % 2 else -0.0])
        narrow = torch.cat([zeros, values(seed if equal else seed + k, 6, -30, 6)])
        trees.append({"model": {"w": narrow.reshape(3, 3), "d": wide}, "n": float(wide[3]), "empty": torch.zeros(0)})
    weights = st.one_of(st.integers(1, 2**20), st.floats(1e-3, 1e3))
    return [Weighted(tree, draw(weights)) for tree in trees]


@settings(max_examples=120, deadline=None)
@given(replies(), st.randoms(use_true_random=False), st.data())
def test_every_grouping_and_order_gives_the_same_bits(
    contributions: list[Weighted], order: random.Random, data: Any
) -> None:
    expected = mean(contributions)
    shuffled = list(contributions)
    order.shuffle(shuffled)
    groups: list[list[Weighted]] = [[] for _ in range(data.draw(st.integers(1, len(shuffled) + 1)))]
    for contribution in shuffled:
        order.choice(groups).append(contribution)
    parts = [delivered(total(group)) if order.random() < 0.3 else total(group) for group in groups]
    assert_same_bits(merged_at_random(parts, order).mean(), expected)


def test_forty_clients_equal_the_exactly_rounded_sum() -> None:
    rng = np.random.default_rng(0)
    weights = [int(n) for n in rng.integers(3, 700, 40)]
    columns = [values(k, 500, -8, 1) for k in range(40)]
    result = mean([Weighted({"w": column}, n) for column, n in zip(columns, weights, strict=True)])["w"]
    for i in range(500):
        exact = math.fsum(n * float(column[i]) for column, n in zip(columns, weights, strict=True))
        assert result[i].item() == np.float32(exact / sum(weights)).item()


def test_sums_beyond_the_mantissa_cancel() -> None:
    tree = {"w": torch.tensor([1e8, -1e8, 1.0])}
    opposite = {"w": torch.tensor([-1e8, 1e8, 1e-9])}
    small = {"w": torch.tensor([3.0e-9, 5.0e-9, 0.0])}
    result = mean([Weighted(tree, 1), Weighted(small, 1), Weighted(opposite, 1)])["w"]
    for i, column in enumerate(zip(tree["w"], small["w"], opposite["w"], strict=True)):
        assert result[i].item() == np.float32(float(sum(Fraction(v.item()) for v in column)) / 3).item()


@pytest.mark.parametrize("weight", [1, 7, 0.3, 2**28])
def test_the_mean_of_one_client_is_its_tensors_bit_for_bit(weight: float) -> None:
    tiny = torch.tensor([1.401298464324817e-45, -5.9e-39, -0.0, 0.0, 3.4e38, -1.1754944e-38])
    tree = {"w": tiny, "d": torch.tensor([5e-324, -0.0, 1.7e308, 0.1], dtype=torch.float64), "n": -1e-300}
    assert_same_bits(mean([Weighted(tree, weight)]), tree)
    alone = ExactSum()
    alone.merge(ExactSum())
    alone.merge(delivered(total([Weighted(tree, weight)])))
    alone.merge(ExactSum())
    assert_same_bits(alone.mean(), tree)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=2, max_size=8), st.integers(0, 2**20))
def test_inv_f2_identical_replies_return_exactly_that_value(weights: list[float], seed: int) -> None:
    tree = {
        "single": torch.cat([values(seed, 20, -44, 5), torch.tensor([0.0, -0.0])]),
        "double": torch.cat([values(seed, 20, -300, 5, torch.float64), torch.tensor([-0.0, 5e-324]).double()]),
        "half": values(seed, 5, -3, 3, torch.float16),
        "brain": values(seed, 5, -30, 5, torch.bfloat16),
        "number": 0.1 * (seed + 1),
    }
    assert_same_bits(mean([Weighted(copy(tree), weight) for weight in weights]), tree)


def test_inv_f2_holds_element_by_element() -> None:
    """A part that no client trains (a frozen head, weights of dead pixels) stays what it is."""
    fixed = values(1, 50, -30, 3, torch.float64)
    trees = [{"w": torch.cat([fixed, values(k, 3, -3, 1, torch.float64)])} for k in range(2, 5)]
    result = mean([Weighted(tree, 3 * k + 1) for k, tree in enumerate(trees)])["w"]
    assert torch.equal(result[:50], fixed)
    assert not (result[50:] == trees[0]["w"][50:]).any()


def test_weights_may_be_counts_fractions_and_numpy_numbers() -> None:
    one, other = {"w": torch.tensor([1.0, -3.0])}, {"w": torch.tensor([2.0, 5.0])}
    expected = {"w": torch.tensor([1.75, 3.0])}
    pairs: list[tuple[Any, Any]] = [
        (1, 3),
        (0.25, 0.75),
        (Fraction(1, 4), Fraction(3, 4)),
        (np.int64(1), np.int32(3)),
        (np.float32(0.25), np.float64(0.75)),
        (2**38, 3 * 2**38),
    ]
    for first, second in pairs:
        assert_same_bits(mean([Weighted(one, first), Weighted(other, second)]), expected)
    weights = [Fraction(1, 3), Fraction(1, 7), Fraction(2, 5)]
    numbers = [0.3, 12.5, -7.25]
    exact = sum(w * Fraction(x) for w, x in zip(weights, numbers, strict=True)) / sum(weights)
    pairs_of = zip(weights, numbers, strict=True)
    found = mean([Weighted({"x": x}, w) for w, x in pairs_of])["x"]  # type: ignore[arg-type]
    assert abs(found - float(exact)) <= 4 * math.ulp(float(exact))


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, None, "3", 10**400, torch.ones(2)])
def test_weights_that_are_no_weights_are_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="weights must be positive and finite numbers, got "):
        ExactSum().add(Weighted({"w": torch.ones(1)}, weight))


def test_weights_under_which_a_mean_would_lose_its_digits_are_refused() -> None:
    trees = [{"a": values(seed, 200, -2, 0, torch.float64)} for seed in range(3)]
    for unit in (2.0**-31, 2.0**-34, 1e-25):
        found = total([Weighted(tree, unit * (n + 1)) for n, tree in enumerate(trees)])
        if unit * 6 < 2.0**-32:
            with pytest.raises(MethodError, match="multiply the weights by a constant"):
                found.mean()
        else:
            expected = sum(tree["a"] * (n + 1) for n, tree in enumerate(trees)) / 6
            assert (found.mean()["a"] - expected).abs().max() < 2.0**-39
    # one among others may be as small as it likes
    found = total([Weighted(trees[0]), Weighted(trees[1], 1e-25)]).mean()
    assert (found["a"] - trees[0]["a"]).abs().max() < 1e-20
    with pytest.raises(MethodError, match="1e-12 in all"):
        total([Weighted(trees[0]), Weighted(trees[1], 1e-12)]).mean_without(Weighted(trees[0]))


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("nan", {"a": {"w": torch.tensor([1.0, math.nan])}, "n": 1.0}, NonFiniteError, "a/w"),
    ("infinity", {"a": {"w": torch.tensor([1.0, -math.inf])}, "n": 1.0}, NonFiniteError, "a/w"),
    ("number", {"a": {"w": torch.tensor([1.0, 2.0])}, "n": math.nan}, NonFiniteError, "'n'"),
    ("integers", {"a": {"w": torch.tensor([1, 2])}, "n": 1.0}, TypeError, "a/w.*int64"),
    ("booleans", {"a": {"w": torch.tensor([True, False])}, "n": 1.0}, TypeError, "a/w.*bool"),
    ("list", {"a": {"w": [torch.ones(1)]}, "n": 1.0}, TypeError, "'a/w' is of type list, not a tensor or a number"),
    ("nothing", {"a": {"w": torch.ones(2)}, "n": None}, TypeError, "'n' is of type NoneType"),
    ("text", {"a": {"w": torch.ones(2)}, "n": "x"}, TypeError, "'n' is of type str"),
    ("digits", {"a": {"w": torch.ones(2)}, "n": 10**400}, TypeError, "'n' is of type int, .* too large"),
    ("shape", {"a": {"w": torch.ones(1, 2)}, "n": 1.0}, ValueError, "a/w"),
    ("type", {"a": {"w": torch.ones(2).double()}, "n": 1.0}, ValueError, "a/w"),
    ("missing", {"a": {"w": torch.ones(2)}}, ValueError, "'n'"),
    ("unknown", {"a": {"w": torch.ones(2), "v": torch.ones(1)}, "n": 1.0}, ValueError, "a/v"),
    ("too_large", {"a": {"w": torch.tensor([1.0, 1e13])}, "n": 1.0}, OverflowError, "diverged"),
    ("number_too_large", {"a": {"w": torch.ones(2)}, "n": 1e300}, OverflowError, "diverged"),
]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize(("tree", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_refused_contribution_leaves_the_sum_as_it_was(
    tree: Tree, error: type[Exception], message: str, before: int
) -> None:
    if before == 0 and error in (ValueError, OverflowError):
        assert_same_bits(mean([Weighted(tree, 2)]), tree)
        return
    good = [Weighted({"a": {"w": torch.tensor([0.1 * k, -k])}, "n": float(k)}, k) for k in range(1, 6)]
    running = total(good[:before])
    for _ in range(2):
        with pytest.raises(error, match=message):
            running.add(Weighted(tree, 2))
    if error in (ValueError, OverflowError):
        with pytest.raises(error, match=message):
            running.merge(total([Weighted(tree, 2)]))
    assert running.count == before
    for contribution in good[before:]:
        running.add(contribution)
    assert_same_bits(running.mean(), mean(good))


def test_a_large_first_contribution_is_refused_only_when_a_second_comes() -> None:
    huge, small = Weighted({"w": torch.tensor([1e30])}, 3), Weighted({"w": torch.tensor([1.0])}, 3)
    running = total([huge])
    for attempt in (lambda: running.add(small), lambda: running.merge(total([small]))):
        with pytest.raises(OverflowError):
            attempt()
        assert_same_bits(running.mean(), huge.tree)


def test_what_is_too_large_is_named_with_what_to_do() -> None:
    text = too_large(Weighted({"a": torch.ones(2), "b": {"c": torch.tensor([1.0, -1e13])}}, 600))
    assert text.startswith(
        "'b/c' holds up to 1e+13 and has the weight 600: weighted values are summed exactly up to 2^43"
    )
    assert "lower train.lr" in text and "divide the weights by a constant" in text


def test_a_sum_that_grows_too_large_is_refused() -> None:
    running = ExactSum()
    contribution = Weighted({"w": torch.tensor([2.0**41, -1.0], dtype=torch.float64)}, 1)
    for _ in range(3):
        running.add(contribution)
    with pytest.raises(OverflowError):
        running.add(contribution)
    running.add(Weighted({"w": torch.tensor([0.0, 3.0], dtype=torch.float64)}, 1))
    assert_same_bits(running.mean(), {"w": torch.tensor([3 * 2.0**39, 0.0], dtype=torch.float64)})


@pytest.mark.parametrize("chunks", [1, 3])
def test_thousands_of_small_contributions_carry(chunks: int) -> None:
    """Low limbs of one sign: without carries they would overflow after 4096 contributions."""
    count = 6000
    rng = np.random.default_rng(1)
    # just below half a unit of the high limb, so that nearly everything is in the low one
    columns = (2.0**-21 * (1 - 2.0 ** rng.integers(-20, -3, (count, 2)))).astype(np.float32)
    parts = [ExactSum() for _ in range(chunks)]
    for k, column in enumerate(columns):
        parts[k % chunks].add(Weighted({"w": torch.from_numpy(column).double()}, 1))
    running = merged_at_random(parts, random.Random(0))
    assert running.count == count
    for i in range(2):
        exact = sum(map(Fraction, columns[:, i].tolist()))
        assert running.mean()["w"][i].item() == float(exact) / count
