"""Reconstructions beside samples: the best assignment, and ratios in dB."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from rayfl.metrics.inversion import matched, psnr


def test_the_assignment_has_the_smallest_sum_of_errors() -> None:
    generator = np.random.default_rng(0)
    true, made = generator.random((2, 5, 1, 3, 2))
    found = matched(true, made)
    each = np.square(true[:, None] - made).mean((2, 3, 4))
    best = min(sum(each[i, place] for i, place in enumerate(order)) for order in permutations(range(5)))
    assert found.errors.sum() == pytest.approx(best)
    np.testing.assert_allclose(found.errors, each[np.arange(5), found.places])


def test_the_order_of_reconstructions_means_nothing() -> None:
    true = np.random.default_rng(1).random((4, 7))
    found = matched(true, true[[2, 0, 3, 1]])
    assert found.places.tolist() == [1, 3, 0, 2] and not found.errors.any()


def test_ratios() -> None:
    np.testing.assert_allclose(psnr(np.array([1, 0.1, 0.001, 0])), [0, 10, 30, np.inf])
