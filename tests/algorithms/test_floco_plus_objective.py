"""FLOCO+: its personal objective, by fixture G15, by gradients and by its quadratic minimiser."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms.floco import barycenter
from algorithms.floco_plus import FlocoPlus
from algorithms.parts.simplex_sampling import sample_simplex
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Batch
from tests.support.floco_plus_toys import TRAIN, plus, simplex_of, toy
from tests.support.toy_networks import normalized_layers
from tests.support.toys import Toy, assert_close, random_clients


def g15() -> tuple[Tensor, Tensor, Tensor]:
    endpoints = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    return endpoints, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)


class PointTask:
    """The loss is half the squared distance of the head weight to a target."""

    class network:
        head_weight = "weight"
        buffer_names = ()

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def loss(self, model: Tree, batch: Any) -> Tensor:
        return 0.5 * ((model["weight"] - self._target) ** 2).sum()


def minimiser(endpoints: Tensor, point: Tensor, target: Tensor, weight: float) -> Tensor:
    """Of the personal objective at a fixed point, by gradient descent."""
    algorithm, moving = FlocoPlus(proximal_weight=weight), endpoints.clone()
    received = {"received": {"body": {}, "endpoints": endpoints}}
    for _ in range(400):
        moving.requires_grad_()
        model = {"body": {}, "endpoints": moving}
        loss = algorithm.personal_objective(model, None, PointTask(target), received, {"point": point})  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, moving)
        moving = (moving - gradient / (weight + 1)).detach()
    return moving


def test_inv_flp_5_quadratic_minimiser() -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in (0.2, 1.0, 3.0):
        endpoints = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        target = torch.randn(3, generator=generator, dtype=torch.float64)
        point = torch.from_numpy(sample_simplex(np.random.default_rng(1), 4, 1)[0])
        gap = point @ endpoints - target
        expected = endpoints - point.outer(gap) / (weight + (point**2).sum())
        assert_close(minimiser(endpoints, point, target, weight), expected, 1e-12)


def test_g15() -> None:
    expected = [[0.615942028986, -0.253623188406], [1.369565217391, 0.847826086957], [0.246376811594, 1.898550724638]]
    found = minimiser(*g15(), 1.0)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), 1e-9)


def test_the_pull_is_towards_the_received_body_and_endpoints() -> None:
    """Its gradient is lambda (theta^k_m - theta_m), also where lambda is not 1, and likewise of the body."""
    run = toy(plus(proximal_weight=0.3))
    received, start = simplex_of(run.server), simplex_of(toy(plus(), seed=1).server)
    part = run.dataset.load(0)["train"]
    batch, draw = Batch(part.x, part.y), {"point": barycenter(3)}
    moved = map_leaves(lambda leaf: leaf.clone().requires_grad_(), start)
    tensors = [*moved["body"].values(), moved["endpoints"]]
    losses = [
        run.algorithm.personal_objective(moved, batch, run.task, {"received": received}, draw),
        run.algorithm.objective(moved, batch, run.task, None, draw),
    ]
    with_pull, without = (torch.autograd.grad(loss, tensors) for loss in losses)
    anchors = [*received["body"].values(), received["endpoints"]]
    for leaf, anchor, total, plain in zip(tensors, anchors, with_pull, without, strict=True):
        assert_close(total, plain + 0.3 * (leaf.detach() - anchor), 1e-14)


def test_running_statistics_are_not_penalised() -> None:
    run = Toy(plus(), random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    simplex = simplex_of(run.server)
    buffers = run.task.network.buffer_names
    body = {name: leaf + 10 if name in buffers else leaf for name, leaf in simplex["body"].items()}
    part = run.dataset.load(0)["train"]
    arguments = copy(simplex), Batch(part.x, part.y), run.task
    draw = {"point": barycenter(3)}
    pulled = run.algorithm.personal_objective(*arguments, {"received": {**simplex, "body": body}}, draw)
    assert len(buffers) == 2
    assert torch.equal(pulled, run.algorithm.objective(copy(simplex), *arguments[1:], None, draw))
