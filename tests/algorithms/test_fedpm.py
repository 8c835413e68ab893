"""FedPM: an oracle with loops, the counts of the server, bits, what is scored, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedpm import FedPM
from rayfl.engine.gradients.counted_normals import drawn_keys, uniforms
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import ClassificationModel
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.cut_out import COHORTS, SIZES, TRAIN, toy_of
from tests.support.toy_networks import DoubleNetwork, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
NAMES = ("inner.weight", "inner.bias", "head.weight", "head.bias")
BITS = 7 * 5 + 7 + 3 * 7 + 3


class Straight(torch.autograd.Function):
    """A mask whose gradient is taken for that of its probability."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, numbers: Tensor) -> Tensor:
        return (numbers < theta).to(theta.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def weights_of(method: FedPM, initial: Tree) -> Tree:
    """The random weights, element by element."""
    found: Tree = {}
    for name in NAMES:
        inputs = 5 if name.startswith("inner") else 7
        size = method.scale * math.sqrt(2 / inputs)
        signed = [-size if value < 0 else size for value in initial[name].flatten().tolist()]
        found[name] = torch.tensor(signed, dtype=torch.float64).view(initial[name].shape)
    return initial if method.weights == "drawn" else found


def bits(theta: Tree, generator: np.random.Generator) -> Tree:
    """Masks, bit by bit."""
    found: Tree = {}
    for name in NAMES:
        own = [float(generator.random() < p) for p in theta[name].flatten().tolist()]
        found[name] = torch.tensor(own, dtype=torch.float64).view(theta[name].shape)
    return found


def trained(toy: Toy, weights: Tree, theta: Tree, client: int, round: int) -> Tree:
    """The scores after a local update with ``torch.optim``."""
    data, streams = toy.dataset.load(client)["train"], toy.context.streams
    scores = {name: (theta[name] / (1 - theta[name])).log().requires_grad_() for name in NAMES}
    optimizer = torch.optim.SGD(scores.values(), 0.1 * 0.9**round, momentum=0.5, weight_decay=0.01)
    plan = plan_batches(SIZES[client], 4, 2 * -(-SIZES[client] // 4), streams.generator("batches", round, client))
    keys = drawn_keys(streams.generator("mix", round, client), plan.steps)
    for index, key in zip(plan.batches(CPU), keys, strict=True):
        numbers, place, masked = uniforms(torch.from_numpy(key), BITS), 0, {}
        for name, leaf in scores.items():
            own = numbers[place : place + leaf.numel()].view(leaf.shape)
            masked[name] = weights[name] * Straight.apply(leaf.sigmoid(), own)
            place += leaf.numel()
        hidden = torch.relu(data.x[index] @ masked["inner.weight"].T + masked["inner.bias"])
        optimizer.zero_grad()
        F.cross_entropy(hidden @ masked["head.weight"].T + masked["head.bias"], data.y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: leaf.detach() for name, leaf in scores.items()}


def expected(toy: Toy, counts: Any, theta: Tree, weights: Tree, cohort: list[int], round: int, every: int) -> Any:
    """Counts, probabilities and the scored model after a round, with loops."""
    method: Any = toy.algorithm
    streams = toy.context.streams
    if round % every == 0:
        counts = {which: {name: torch.full_like(theta[name], method.prior) for name in NAMES} for which in "ab"}
    for client in cohort:
        scores = trained(toy, weights, theta, client, round)
        mask = bits({name: leaf.sigmoid() for name, leaf in scores.items()}, streams.generator("mask", round, client))
        for name in NAMES:
            counted = mask[name] * (1 - method.epsilon) + (1 - mask[name]) * method.epsilon
            counts["a"][name] = counts["a"][name] + counted
            counts["b"][name] = counts["b"][name] + 1 - counted
    theta = {name: (counts["a"][name] - 1) / (counts["a"][name] + counts["b"][name] - 2) for name in NAMES}
    mask = theta if method.evaluate == "mean" else bits(theta, streams.generator("mask", round))
    return counts, theta, {name: weights[name] * mask[name] for name in NAMES}


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 3),
        ({"reset_every": 1, "scale": 1.5, "evaluate": "mean"}, 1),
        ({"weights": "drawn", "prior": 2.5, "epsilon": 0.1, "reset_every": 2}, 2),
    ],
    ids=["paper", "code", "drawn"],
)
@MODES
def test_inv_fedpm_1_rounds_are_those_of_an_oracle_with_loops(options: dict[str, Any], every: int, mode: str) -> None:
    method = FedPM(**options)
    toy = toy_of(method, mode=mode)
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    weights, theta = weights_of(method, initial), copy(toy.server["theta"])
    counts: Any = None
    for round, cohort in enumerate(COHORTS):
        counts, theta, model = expected(toy, counts, theta, weights, cohort, round, every)
        found = toy.step(cohort)
        assert_close(found["theta"], theta, 1e-12)
        assert_close(found["alpha"], counts["a"], 1e-12)
        assert_close(found["beta"], counts["b"], 1e-12)
        assert_close(found["model"], model, 1e-12)


@MODES
def test_inv_fedpm_2_weights_never_move_and_what_is_scored_is_some_of_them(mode: str) -> None:
    toy = toy_of(FedPM(), mode=mode)
    weights = weights_of(FedPM(), toy.task.network.initialize(toy.context.streams.integer("init.global")))
    for cohort in COHORTS:
        model = toy.step(cohort)["model"]
        for name, leaf in model.items():
            assert bool(((leaf == 0) | (leaf == weights[name])).all()), name
    shares = torch.cat([(leaf != 0).double().flatten() for leaf in model.values()])
    theta = torch.cat([leaf.flatten() for leaf in toy.server["theta"].values()])
    assert abs(float((shares - theta).sum())) < 4 * math.sqrt(float((theta * (1 - theta)).sum()))


def test_inv_fedpm_3_a_client_sends_a_bit_for_each_weight() -> None:
    toy = toy_of(FedPM())
    toy.step([1, 2])
    assert toy.federation.traffic.by_client == dict.fromkeys((1, 2), (8 * BITS, -(-BITS // 8)))
    toy = Toy(FedPM(), random_clients(SIZES), normalized_layers(), TRAIN)
    toy.step([1])
    assert toy.federation.traffic.by_client == {1: (8 * (BITS + 2 * 7), -(-BITS // 8) + 8 * 2 * 7)}


def test_inv_fedpm_4_with_a_reset_in_every_round_theta_is_the_mean_of_the_bits() -> None:
    toy = toy_of(FedPM(reset_every=1, epsilon=0.01))
    for cohort in COHORTS:
        toy.step(cohort)
        for leaf in toy.server["theta"].values():
            ones = (leaf - 0.01) / 0.98 * len(cohort)
            assert_close(ones, ones.round(), 1e-9)


@pytest.mark.parametrize(("cohort", "every"), [(2, 3), (5, 1), (1, 5)])
def test_counts_begin_again_after_a_pass_over_the_clients(cohort: int, every: int) -> None:
    toy = toy_of(FedPM(), TRAIN.model_copy(update={"clients_per_round": cohort, "local_epochs": 1}))
    for round in range(6):
        total = next(iter(toy.step([0])["alpha"].values())) + next(iter(toy.server["beta"].values()))
        assert_close(total, torch.full_like(total, 2 + round % every + 1), 1e-12)


def test_layers_of_normalization_stay_and_running_statistics_are_averaged() -> None:
    toy = Toy(FedPM(), random_clients(SIZES), normalized_layers(), TRAIN)
    before = copy(toy.server["model"])
    assert set(toy.server["theta"]) == set(NAMES)
    after = toy.step([0, 1])["model"]
    for name in ("norm.weight", "norm.bias"):
        assert torch.equal(after[name], before[name])
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(after[name], before[name])


def test_the_published_model_has_the_mask_that_the_client_has_sent() -> None:
    toy = toy_of(FedPM(reset_every=1))
    toy.step([3])  # the server's counts are those of this one mask
    weights = weights_of(FedPM(), toy.task.network.initialize(toy.context.streams.integer("init.global")))
    test = toy.dataset.load(3)["test"]
    own = {name: leaf * (toy.server["theta"][name] > 0.5) for name, leaf in weights.items()}
    hidden = torch.relu(test.x @ own["inner.weight"].T + own["inner.bias"])
    right = (hidden @ own["head.weight"].T + own["head.bias"]).argmax(1) == test.y
    assert toy.federation.trained_scores[3]["test"]["local"].top1 == pytest.approx(float(right.double().mean()))


def test_stacked_and_looped_clients_draw_the_same_masks() -> None:
    train = TrainConfig(rounds=2, clients_per_round=5, local_epochs=3, batch_size=4, lr=0.5, optimizer="adam")
    one, other = (toy_of(FedPM(), train, mode=mode) for mode in ("looped", "vectorized"))
    for _ in range(2):
        assert_equal(one.step()["model"], other.step()["model"])


class Scales(ClassificationModel):
    """A head that requires no gradient behind numbers that do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3).requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        return x * self.scale

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def test_a_model_without_a_matrix_is_refused() -> None:
    task = Classification(DoubleNetwork(Scales))
    with pytest.raises(ConfigError, match="two dimensions"):
        FedPM().check(task, toy_of(FedPM()).context)
    FedPM().check(two_layers(), toy_of(FedPM()).context)
