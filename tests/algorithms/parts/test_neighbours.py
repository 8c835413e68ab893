"""Mixtures of the nearest models: distances, weights, and models that have diverged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.parts import neighbours
from algorithms.parts.neighbours import inverse_weights, mixtures, squared_distances
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal


def trees(count: int, far: float = 0.0) -> list[Tree]:
    generator = torch.Generator().manual_seed(count)
    shapes = {"first": (4, 3), "second": (5,)}
    return [
        {"one": {name: far + torch.randn(shape, generator=generator).double() for name, shape in shapes.items()},
         "steps": torch.tensor(7)}
        for _ in range(count)
    ]  # fmt: skip


def vector(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree["one"].values()])


def parts(tree: Tree) -> list[Tensor]:
    return list(tree["one"].values())


@pytest.mark.parametrize("block", [1 << 22, 8])
@pytest.mark.parametrize("far", [0.0, 1e6])
def test_distances_are_those_of_each_pair(block: int, far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_BLOCK", block)
    points, models = trees(4, far), trees(5, far)[:4]
    points[1] = {"one": {name: leaf + 1e-4 for name, leaf in models[1]["one"].items()}}
    found = squared_distances([parts(one) for one in points], [parts(one) for one in models])
    expected = torch.stack([torch.stack([(vector(a) - vector(b)).square().sum() for b in models]) for a in points])
    assert (found / expected - 1).abs().max() < 1e-12


def test_weights_are_inverse_distances_of_the_nearest() -> None:
    distances = torch.tensor([[4.0, 1.0, 2.0], [1.0, 1.0, 8.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    weights, columns = inverse_weights(distances, 2)
    assert columns.tolist() == [[1, 2], [0, 1], [0, 2]]
    assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64), 1e-15)
    assert inverse_weights(distances, 7)[0].shape == (3, 3)


def test_what_has_diverged_is_in_nobody_elses_mixture() -> None:
    models = trees(3)
    models[1]["one"]["second"][2] = torch.nan
    distances = squared_distances([parts(one) for one in models], [parts(one) for one in models])
    weights, columns = inverse_weights(distances + 1, 3)
    mixed = mixtures(models, weights, columns)
    for client in (0, 2):
        assert vector(mixed[client]).isfinite().all()
        assert weights[client, columns[client] == 1].tolist() == [0]
    assert weights[1].tolist() == [1, 0, 0]
    assert columns[1, 0] == 1


@pytest.mark.parametrize("block", [1 << 22, 8])
def test_mixtures_are_weighted_sums(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_BLOCK", block)
    models = trees(4)
    columns = torch.tensor([[1, 0], [3, 2], [0, 1]])
    weights = torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    mixed = mixtures(models, weights, columns)
    assert_close(vector(mixed[0]), 0.75 * vector(models[1]) + 0.25 * vector(models[0]), 1e-15)
    assert_equal(mixed[1], models[3])
    assert mixed[2]["steps"].dtype == torch.int64
    assert mixed[2]["steps"] == 7
    mixed[1]["one"]["first"].zero_()
    assert models[3]["one"]["first"].any()


class Counting(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_small_clients_take_few_operations_each_and_none_for_each_pair() -> None:
    generator = torch.Generator().manual_seed(0)
    models = [{"weight": torch.randn(20, 50, generator=generator)} for _ in range(1000)]
    vectors = [[model["weight"]] for model in models]
    with Counting() as counting:
        mixed = mixtures(models, *inverse_weights(squared_distances(vectors, vectors), 5))
    assert counting.count < 30 * len(models)
    for one, own in zip(mixed, models, strict=True):
        assert_equal(one, own)  # each has distance 0 to itself
