"""Samples that are found from a gradient, and labels from that of a head's bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from rayfl.runs.gradient_matching import Attack, Leak, inferred_labels, total_variation
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification

SPEC = InputSpec("image", (1, 4, 4), 3)


def leak_of(x: Tensor, y: Tensor, spec: InputSpec = SPEC, architecture: Any = None) -> Leak:
    """What a client with one step on these samples gives away."""
    (network,) = [(architecture or TwoNN(hidden=(32,))).network(spec)]
    task = Classification(network)
    model = network.initialize(0)
    leak = Leak(task, model, {name: model[name] for name in network.parameter_names}, y)
    return Leak(task, model, dict(zip(leak.gradient, leak.gradient_of(x), strict=True)), y)


def test_the_gradient_is_that_of_the_loss_and_changes_nothing() -> None:
    x, y = torch.rand(5, 1, 4, 4), torch.arange(5) % 3
    leak = leak_of(x, y)
    before = {name: leaf.clone() for name, leaf in leak.model.items()}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leak.model.items()}
    expected = torch.autograd.grad(leak.task.loss(leaves, Batch(x, y)), list(leaves.values()))
    torch.testing.assert_close(list(leak.gradient.values()), list(expected))
    assert all(torch.equal(before[name], leaf) for name, leaf in leak.model.items())


@pytest.mark.parametrize("objective", ["cosine", "l2"])
def test_a_single_image_is_found(objective: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(1, 1, 4, 4), torch.tensor([2])
    low, high = torch.zeros(1, 4, 4), torch.ones(1, 4, 4)
    attack = Attack(objective, iterations=150, smoothness=0)
    found, value = attack.found(leak_of(x, y), low, high, True)
    assert value < 1e-3 and (found - x).square().mean() < 1e-3
    again, _ = attack.found(leak_of(x, y), low, high, True)
    assert torch.equal(found, again)


def test_a_vector_is_found_in_the_units_of_its_columns() -> None:
    torch.manual_seed(0)
    spec = InputSpec("image", (6,), 3)
    low, high = torch.full((6,), 0.5), torch.full((6,), 2.5)
    x, y = low + torch.randn(1, 6) * 2, torch.tensor([1])
    found, _ = Attack("l2", iterations=150).found(leak_of(x, y, spec), low, high, False)
    assert (found - x).square().mean() < 1e-3


def test_the_best_of_several_starts_counts() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    leak, edges = leak_of(x, y), (torch.zeros(1, 4, 4), torch.ones(1, 4, 4))
    counted: list[int] = []
    one = Attack("cosine", 20, 1, seed=3).found(leak, *edges, True)[1]
    several = Attack("cosine", 20, 4, seed=3, report=lambda: counted.append(1)).found(leak, *edges, True)[1]
    assert several <= one and len(counted) == 80


def test_what_diverges_has_no_finite_objective() -> None:
    leak = leak_of(torch.rand(1, 1, 4, 4), torch.tensor([0]))
    broken = Leak(leak.task, leak.model, {n: g * math.nan for n, g in leak.gradient.items()}, leak.labels)
    found, value = Attack(iterations=2).found(broken, torch.zeros(1, 4, 4), torch.ones(1, 4, 4), True)
    assert value == math.inf and found.isfinite().all()


def test_total_variation() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]])
    assert total_variation(x) == pytest.approx((1 + 0) / 2 + (0.5 + 0.5) / 2)
    assert total_variation(torch.ones(2, 3, 1, 1)) == 0


def test_labels_follow_from_the_gradient_of_the_bias() -> None:
    probability = torch.tensor([0.2, 0.3, 0.1, 0.4])
    for labels in ([0], [3], [1, 1, 2], [0, 0, 3, 3, 3], [2] * 4):
        share = torch.bincount(torch.tensor(labels), minlength=4) / len(labels)
        assert inferred_labels(probability - share, probability, len(labels)).tolist() == labels
    # Of one sample whatever is supposed of the probabilities.
    slope = torch.tensor([0.5, 0.2, -0.9, 0.2])
    assert inferred_labels(slope, torch.full((4,), 0.25), 1).tolist() == [2]
