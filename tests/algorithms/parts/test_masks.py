"""Sparse models: how many elements stay, which leave and enter, and messages that have only these."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.parts.masks import (
    decoded,
    drawn_masks,
    encoded,
    kept_count,
    kept_shares,
    masked,
    with_largest,
    without_smallest,
)
from rayfl.params import num_bytes
from tests.support.toys import assert_equal

SHAPES = {"conv": (16, 3, 5, 5), "bias": (16,), "inner": (120, 400), "head": (10, 120), "scale": ()}


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 0.9, 1.0])
def test_inv_masks_1_shares_by_size_keep_the_density_of_the_whole(density: float) -> None:
    shares = kept_shares(SHAPES, density, by_size=True)
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    assert sum(shares[name] * sizes[name] for name in SHAPES) == pytest.approx(density * sum(sizes.values()))
    assert all(0 < share <= 1 for share in shares.values())
    sparse = [name for name, share in shares.items() if share < 1]
    raw = {name: sum(SHAPES[name] or (1,)) / sizes[name] for name in SHAPES}
    assert len({round(shares[name] / raw[name], 9) for name in sparse}) <= 1
    assert kept_shares(SHAPES, density, by_size=False) == dict.fromkeys(SHAPES, density)


def test_shares_by_hand() -> None:
    """Of 100 x 100 and 10 x 10 half is kept: the small one, which would keep 5.05 times as much as it has, whole."""
    shares = kept_shares({"large": (100, 100), "small": (10, 10)}, 0.5, by_size=True)
    assert shares["small"] == 1
    assert shares["large"] * 10_000 + 100 == pytest.approx(5050)
    # of scalars of 0.02 and 0.2 both are sparse: 0.02 s 10000 + 0.2 s 100 = 220 s
    shares = kept_shares({"large": (100, 100), "small": (10, 10)}, 0.01, by_size=True)
    assert shares["large"] == pytest.approx(0.02 * 101 / 220) and shares["small"] == pytest.approx(0.2 * 101 / 220)


def test_drawn_masks_have_their_share() -> None:
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shares = kept_shares(SHAPES, 0.3, by_size=True)
    one, other = (drawn_masks(model, shares, np.random.default_rng(seed)) for seed in range(2))
    for name, leaf in model.items():
        assert one[name].shape == leaf.shape and one[name].dtype == torch.bool
        assert int(one[name].sum()) == int(other[name].sum()) == kept_count(shares[name], leaf.numel())
    assert (one["inner"] != other["inner"]).any() and one["bias"].all()


def test_the_least_leave_and_the_largest_enter() -> None:
    leaf = torch.tensor([[0.5, 0.0, -0.1], [3.0, 0.0, -2.0]])
    mask = torch.tensor([[True, False, True], [True, False, True]])
    fewer = without_smallest(mask, leaf, 2)
    assert fewer.tolist() == [[False, False, False], [True, False, True]]
    merit = torch.tensor([[0.1, 0.3, 0.2], [9.0, 0.0, 9.0]])
    assert with_largest(fewer, merit, 2).tolist() == [[False, True, True], [True, False, True]]
    assert with_largest(fewer, torch.zeros(2, 3), 0).tolist() == fewer.tolist()
    full = torch.ones(2, 3, dtype=torch.bool)
    assert with_largest(without_smallest(full, leaf, 3), merit, 3).all()


def test_inv_masks_2_a_message_has_the_kept_elements_and_a_bit_for_each() -> None:
    model = {"a": torch.randn(5, 7, dtype=torch.float64), "b": torch.randn(3), "c": torch.randn(4), "e": torch.randn(2)}
    masks = {"a": torch.rand(5, 7) < 0.4, "b": torch.ones(3, dtype=torch.bool), "e": torch.zeros(2, dtype=torch.bool)}
    sparse = masked(model, masks)
    message = encoded(sparse, masks)
    assert num_bytes(message) == 8 * int(masks["a"].sum()) + 5 + 4 * 3 + 4 * 4 + 0 + 1
    found, seen = decoded(message, model)
    assert_equal(found, sparse)
    assert_equal(seen, {**masks, "c": torch.ones(4, dtype=torch.bool)})
    message["values"]["b"].fill_(1)
    assert not torch.equal(sparse["b"], torch.ones(3))
