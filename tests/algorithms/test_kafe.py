"""KAFE: rounds of an oracle, the law of the draws by scikit-learn's density, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KernelDensity
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.kafe import Kafe
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.partial_toys import SIZES, TRAIN, initial, partly_fixed, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

ROUNDS = [[0, 1, 2, 3], [1, 2], [0, 1, 3]]
BODY = ("inner.weight", "inner.bias")


def trained(toy: Toy, model: Tree, client: int, round: int) -> Tree:
    """A client's local update in plain PyTorch."""
    part = toy.dataset.load(client)["train"]
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(SIZES[client], 4, 2 * -(-SIZES[client] // 4), generator).batches(CPU):
        optimizer.zero_grad()
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index]).backward()
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"aggregation": "uniform", "bandwidth": 0.3, "draws": 7}, {"kernel": "tophat", "bandwidth": 0.5}],
)
def test_inv_kafe_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any]) -> None:
    method = Kafe(**options)
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate(ROUNDS):
        models = [trained(toy, model, client, round) for client in cohort]
        sizes = np.array([1.0 if method.aggregation == "uniform" else SIZES[client] for client in cohort])
        shares = sizes / sizes.sum()
        model = {name: sum(float(q) * one[name] for q, one in zip(shares, models, strict=True)) for name in BODY}
        generator = toy.context.streams.generator("density", round)
        for name in ("head.weight", "head.bias"):
            shape, count = models[0][name].shape, method.draws or len(cohort)
            chosen = generator.choice(len(cohort), count, p=shares)
            noise = generator.standard_normal((count, math.prod(shape)))
            if method.kernel == "tophat":
                radii = generator.random((count, 1))
            total = torch.zeros(shape, dtype=torch.float64)
            for draw, place in enumerate(chosen):
                eps = noise[draw]
                if method.kernel == "tophat":
                    eps = eps / math.sqrt(float((eps**2).sum())) * radii[draw] ** (1 / len(eps))
                total += models[place][name] + method.bandwidth * torch.from_numpy(eps).view(shape)
            model[name] = total / count
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)


@pytest.mark.parametrize("kernel", ["gaussian", "tophat"])
def test_inv_kafe_2_draws_have_the_law_of_scikit_learns_density(kernel: Any) -> None:
    """Mean and variance of each number, over many means of m draws."""
    points = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = np.array([0.5, 0.3, 0.2])
    method, generator = Kafe(bandwidth=0.7, kernel=kernel), np.random.default_rng(0)
    found = torch.stack([method.drawn(points, shares, generator) for _ in range(1500)]).flatten(1)
    density = KernelDensity(bandwidth=0.7, kernel=kernel).fit(points.flatten(1).numpy(), sample_weight=shares)
    known = density.sample(30_000, random_state=0).reshape(10_000, 3, 4).mean(1)
    assert np.abs(found.numpy().mean(0) - known.mean(0)).max() < 0.1
    assert np.abs(found.numpy().std(0) - known.std(0)).max() < 0.05


def test_inv_kafe_3_many_draws_without_noise_are_federated_averaging() -> None:
    one, other = toy_of(Kafe(bandwidth=0, draws=20_000)), toy_of(FedAvg())
    for cohort in ROUNDS:
        one.server = other.server
        one.step(cohort)
        other.step(cohort)
        for name, leaf in other.server["model"].items():
            apart = float((one.server["model"][name] - leaf).abs().max())
            assert apart < (1e-2 if name.startswith("head") else 1e-12)


def test_inv_kafe_4_equal_layers_keep_their_mean_whatever_is_drawn() -> None:
    points = torch.ones(4, 3, dtype=torch.float64).cumsum(1)
    found = Kafe(bandwidth=0).drawn(points, np.full(4, 0.25), np.random.default_rng(0))
    assert_close(found, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("size", [1, 50])
def test_the_ball_is_filled_evenly(size: int) -> None:
    """The share of draws within radius r is r^d."""
    noise = Kafe(kernel="tophat").noise(20_000, size, np.random.default_rng(0))
    radii = np.linalg.norm(noise, axis=1)
    assert radii.max() <= 1
    median = 0.5 ** (1 / size)
    assert (radii < median).mean() == pytest.approx(0.5, abs=0.02)


def test_a_last_layer_that_nobody_trains_is_refused() -> None:
    toy = toy_of(Kafe(), task=three_layers())
    with pytest.raises(ConfigError, match="KAFE needs the last layer's weight to be trained"):
        toy.algorithm.check(partly_fixed("head.weight"), toy.context)


def test_a_bias_that_nobody_trains_is_not_drawn() -> None:
    toy = Toy(Kafe(), random_clients(SIZES, dtype=torch.float32), partly_fixed("head.bias"), TRAIN)
    toy.step([0, 1])
    assert "head.bias" not in toy.server["model"]
    assert isinstance(toy.server["model"]["head.weight"], Tensor)
