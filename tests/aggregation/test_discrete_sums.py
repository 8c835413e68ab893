"""The way of a change into a modular sum and back: rotation, rounding to a bound, modulus."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as by_hand

from rayfl.aggregation.discrete_sums import (
    from_tree,
    hadamard,
    in_integers,
    in_tree,
    padded,
    rotated,
    rounded_norm,
    rounded_sum,
    shortened,
    turned_back,
    wrapped,
)

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_rotation_is_by_hadamards_matrix(size: int) -> None:
    values = torch.from_numpy(GENERATOR.standard_normal((3, size)))
    expected = values @ torch.from_numpy(by_hand(size).astype(np.float64)) / size**0.5
    torch.testing.assert_close(hadamard(values), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("entries", [1, 5, 100])
def test_inv_isometry_1_what_is_rotated_and_turned_back_is_as_long_and_the_same(entries: int) -> None:
    changes = torch.from_numpy(GENERATOR.standard_normal((2, entries)))
    signs = torch.from_numpy(1.0 - 2.0 * GENERATOR.integers(2, size=padded(entries)))
    found = rotated(changes, signs)
    assert found.shape[1] == padded(entries) < 2 * entries or entries == 1
    torch.testing.assert_close(found.norm(dim=1), changes.norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(turned_back(found, signs, entries), changes, atol=1e-12, rtol=0)


def test_inv_bound_1_a_long_change_has_the_norm_and_a_short_one_stays() -> None:
    changes = torch.from_numpy(GENERATOR.standard_normal((3, 20))) * torch.tensor([[1.0], [1e-3], [0.0]])
    found = shortened(changes, 0.5)
    assert float(found[0].norm()) == pytest.approx(0.5, rel=1e-12)
    assert torch.equal(found[1:], changes[1:])


def rolled(values: torch.Tensor, norm: float, seeds: range) -> torch.Tensor:
    return in_integers(values.expand(len(seeds), -1), norm, [np.random.default_rng(seed) for seed in seeds])


@pytest.mark.parametrize(("norm", "entries"), [(0.3, 64), (3.0, 64), (200.0, 16)])
def test_inv_bound_2_roundings_keep_the_bound_and_are_neighbours(norm: float, entries: int) -> None:
    direction = torch.from_numpy(GENERATOR.standard_normal(entries))
    values = direction * norm / direction.norm()
    found = rolled(values, norm, range(400))
    assert torch.equal(found, found.round())
    assert float((found - values).abs().max()) < 1
    assert float(found.norm(dim=1).max()) <= rounded_norm(norm, entries) <= norm + entries**0.5
    assert float(found.abs().sum(1).max()) <= rounded_sum(rounded_norm(norm, entries), entries)
    assert float((found.mean(0) - values).abs().max()) < 0.15, "about right on average"
    assert not rolled(torch.zeros(8), norm, range(3)).any(), "no change is no change"


def test_a_rounding_that_is_too_long_is_drawn_once_more_and_others_stay() -> None:
    """Half of sixteen coins are up on average; the bound leaves out the roundings with thirteen of them or more."""
    values = torch.full((16,), 0.5, dtype=torch.float64)
    longest = rounded_norm(2.0, 16)
    assert longest**2 == pytest.approx(4 + 4 + 2 + 2)
    found = rolled(values, 2.0, range(300))
    once = torch.stack([(values + torch.from_numpy(np.random.default_rng(s).random(16))).floor() for s in range(300)])
    kept = once.norm(dim=1) <= longest
    assert 0 < int((~kept).sum()) < 300
    assert float(found.norm(dim=1).max()) <= longest
    assert torch.equal(found[kept], once[kept]) and not torch.equal(found[~kept], once[~kept])
    alone = torch.cat([rolled(values, 2.0, range(seed, seed + 1)) for seed in range(300)])
    assert torch.equal(found, alone), "each by itself is as all together"


def test_what_is_no_number_stays_to_be_found() -> None:
    assert rolled(torch.tensor([1.0, float("nan")], dtype=torch.float64), 5.0, range(1)).isnan().any()
    assert shortened(torch.tensor([[1.0, float("inf")]]), 5.0).isnan().any()


@pytest.mark.parametrize("bits", [3, 12, 32])
def test_inv_group_1_sums_of_wrapped_integers_wrap_to_the_sum(bits: int) -> None:
    numbers = GENERATOR.integers(-(2**40), 2**40, (5, 50))
    expected = [(sum(map(int, column)) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for column in numbers.T]
    wide = torch.from_numpy(numbers).double()
    assert wrapped(wide.sum(0), bits).tolist() == expected
    assert wrapped(wrapped(wide, bits).sum(0), bits).tolist() == expected


def test_a_message_in_a_sum_has_its_paths_and_shapes() -> None:
    shapes = {"b/weight": torch.Size((2, 3)), "a": torch.Size(())}
    tree = in_tree(torch.arange(8.0), shapes)
    assert torch.equal(tree["b"]["weight"], torch.arange(1.0, 7).view(2, 3))
    values, own = from_tree(tree)
    assert torch.equal(values, torch.arange(8.0).double()) and {path: one.shape for path, one in own.items()} == shapes
    assert from_tree(in_tree(torch.arange(4.0), {"a": torch.Size((4,))}))[0].tolist() == [0, 1, 2, 3]
