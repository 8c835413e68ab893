"""The local dimensionality of points, and the component of higher values, by which FedCorr tells noisy clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.parts.dimensionality import local_dimensionality
from algorithms.parts.noisy_clients import in_higher_component
from tests.support.toys import assert_close


def dimension_by_hand(points: Tensor, neighbours: int) -> float:
    """The mean over points, distance by distance."""
    found = []
    for i, point in enumerate(points):
        apart = sorted(math.dist(point.tolist(), other.tolist()) for j, other in enumerate(points) if j != i)
        nearest = apart[:neighbours]
        found.append(-len(nearest) / sum(math.log(r / (nearest[-1] + 1e-6)) for r in nearest))
    return sum(found) / len(found)


def test_inv_corr_3_points_of_a_line_a_plane_and_a_cube_have_their_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    for dimension in (1, 2, 3):
        flat = torch.rand(1500, dimension, generator=generator, dtype=torch.float64)
        turned = flat @ torch.linalg.qr(torch.randn(7, 7, generator=generator, dtype=torch.float64))[0][:dimension]
        # the farthest neighbour counts among k, so that the estimate is that of k - 1 times k / (k - 1)
        found = local_dimensionality(turned, 40).median()
        assert float(found) == pytest.approx(dimension, rel=0.15)


def test_inv_corr_4_dimensionality_is_that_of_the_shape_alone() -> None:
    points = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = local_dimensionality(points, 8)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    assert_close(local_dimensionality(points[order], 8), found[order], 1e-12)
    torch.testing.assert_close(local_dimensionality(1e3 * points + 5, 8), found, rtol=1e-5, atol=0)
    assert float(found.mean()) == pytest.approx(dimension_by_hand(points, 8), rel=1e-12)


def test_inv_corr_5_doubles_few_points_and_equal_distances_have_no_dimension() -> None:
    points = torch.ones(6, 3)
    assert not local_dimensionality(points, 4).any()
    points[0] = 0
    assert not local_dimensionality(points, 4).any()
    assert local_dimensionality(points[:2], 4).tolist() == [0, 0]
    assert len(local_dimensionality(points[:0], 4)) == 0


def test_many_points_are_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.randn(50, 3, generator=torch.Generator().manual_seed(3))
    found = local_dimensionality(points, 5)
    monkeypatch.setattr("algorithms.parts.dimensionality._ROWS", 7)
    assert torch.equal(local_dimensionality(points, 5), found)


def test_what_is_alike_or_alone_is_in_no_higher_component() -> None:
    for values in ([], [3.0], [2.0, 2.0, 2.0]):
        assert not in_higher_component(np.array(values)[:, None]).any()
