"""FedCM: an oracle in plain PyTorch, federated averaging, constant gradients, idle rounds, buffers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedcm import FedCM
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, map_leaves, num_bytes, zeros_like
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
WEIGHTS = pytest.mark.parametrize("weights", ["uniform", "samples", "population"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def quad(algorithm: Any, points: Any, copies: Any, start: float = 1.0, **train: Any) -> Toy:
    section = TrainConfig(**{"rounds": 3, "clients_per_round": "all", "batch_size": None, "lr": 0.1, **train})
    return Toy(algorithm, quadratic_clients(points, copies), Quadratic(start=start), section)


@WEIGHTS
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_inv_cm_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any, server_lr: float) -> None:
    """Algorithm 1 step by step: Delta is summed up from the steps v themselves, not from the distance moved."""
    alpha, train = 0.3, TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(FedCM(alpha=alpha, server_lr=server_lr, aggregation=weights), train)
    network, streams = toy.task.network, toy.context.streams
    x = network.initialize(streams.integer("init.global"))
    delta = zeros_like(x)
    for round, cohort in enumerate(COHORTS):
        eta, steps = 0.1 * 0.8**round, 0.0
        counted = cohort if weights == "samples" else range(len(SIZES))
        q = [1 / len(cohort) if weights == "uniform" else SIZES[i] / sum(SIZES[j] for j in counted) for i in cohort]
        total = zeros_like(x)
        for share, i in zip(q, cohort, strict=True):
            part, k = toy.dataset.load(i)["train"], 2 * -(-SIZES[i] // 4)
            own = copy(x)
            for index in plan_batches(SIZES[i], 4, k, streams.generator("batches", round, i)).batches(CPU):
                leaves = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
                loss = F.cross_entropy(network.logits(leaves, part.x[index]), part.y[index])
                for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    v = alpha * g + (1 - alpha) * delta[name] + 0.01 * own[name]
                    total[name] += share * v
                    own[name] = own[name] - eta * v
            steps += share * k
        delta = {name: leaf / steps for name, leaf in total.items()}
        x = {name: leaf - server_lr * eta * steps * delta[name] for name, leaf in x.items()}
        toy.step(cohort)
        assert_close(toy.server["model"], x, 1e-12)
        assert_close(toy.server["momentum"], delta, 1e-12)
    assert max(float(leaf.abs().max()) for leaf in delta.values()) > 1e-2


@MODES
@WEIGHTS
def test_inv_cm_2_with_the_own_gradient_alone_it_is_federated_averaging(mode: str, weights: Any) -> None:
    cm, plain = (
        toy_of(method, mode=mode) for method in (FedCM(alpha=1.0, aggregation=weights), FedAvg(aggregation=weights))
    )
    for cohort in COHORTS:
        assert_equal(cm.step(cohort)["model"], plain.step(cohort)["model"])


def test_inv_cm_3_delta_has_the_scale_of_a_gradient_whoever_takes_part() -> None:
    """Where the gradient stays the same, Delta is (1 - (1 - alpha)^t) times it, for any K_i and any rates."""
    alpha, slope = 0.25, -3e6
    for weights in ("uniform", "samples", "population"):
        toy = quad(
            FedCM(alpha=alpha, aggregation=weights),
            (3e6,) * 4,  # so far that a few steps change the gradient by little
            (1, 5, 2, 3),
            start=0.0,
            batch_size=1,
            lr=1e-9,
            lr_decay=0.5,
        )
        for t, cohort in enumerate(([0], [1, 2], [3], [0, 1, 2, 3]), 1):
            toy.step(cohort)
            expected = (1 - (1 - alpha) ** t) * slope
            assert float(toy.server["momentum"]["theta"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_inv_cm_4_fixed_point() -> None:
    """Where the cohort's gradients and Delta are 0 nothing moves; from elsewhere all clients together get there."""
    toy = quad(FedCM(alpha=0.2), (2.0, 2.0), (1, 3), start=2.0)
    before = copy(toy.server)
    assert_close(toy.step([0, 1]), before, 1e-15)
    toy = quad(FedCM(alpha=0.2), (0.0, 3.0, 6.0), (1, 1, 1), start=-4.0, local_epochs=1)
    for _ in range(300):
        toy.step([0, 1, 2])
    assert abs(float(toy.server["model"]["theta"]) - 3.0) < 1e-6
    assert abs(float(toy.server["momentum"]["theta"])) < 1e-6


@pytest.mark.parametrize("double", [True, False])
@WEIGHTS
def test_vectorized_agrees_with_looped(weights: Any, double: bool) -> None:
    assert_modes_agree(FedCM(alpha=0.2, aggregation=weights), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@MODES
@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_a_round_without_steps_keeps_model_and_momentum(mode: str, idle: dict[str, Any]) -> None:
    toy = toy_of(FedCM(), TRAIN.model_copy(update=idle), mode=mode)
    toy.server = {**toy.server, "momentum": map_leaves(torch.ones_like, toy.server["momentum"])}
    before = copy(toy.server)
    for cohort in ([0, 1, 2, 3], [1, 2]):
        assert_equal(toy.step(cohort), before)


def test_buffers_are_averaged_and_have_no_momentum() -> None:
    methods = FedCM(alpha=1.0, server_lr=0.5), FedAvg(aggregation="uniform")
    cm, plain = (Toy(method, random_clients((8, 12, 6)), normalized_layers(), TRAIN) for method in methods)
    cm.step([0, 1])
    plain.step([0, 1])
    network = cm.task.network
    assert set(cm.server["momentum"]) == set(network.parameter_names) and network.buffer_names
    for name in network.buffer_names:
        assert_close(cm.server["model"][name], plain.server["model"][name], 1e-12)


def test_two_models_go_down_and_one_up_and_clients_keep_nothing() -> None:
    toy = toy_of(FedCM())
    size = num_bytes(toy.server["model"])
    for cohort in COHORTS[1:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (2 * size, size))
    assert not any(toy.states().values())


def test_the_objective_has_the_mixed_gradient() -> None:
    task = two_layers()
    model, delta = (task.network.initialize(seed) for seed in range(2))
    part = random_clients((6,)).load(0)["train"]
    theta = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}

    def gradients(value: Any) -> Tree:
        return dict(zip(theta, torch.autograd.grad(value, list(theta.values())), strict=True))

    found = gradients(FedCM(alpha=0.3).objective(theta, Batch(part.x, part.y), task, {"momentum": delta}, None))
    plain = gradients(F.cross_entropy(task.network.logits(theta, part.x), part.y))
    for name in model:
        assert_close(found[name], 0.3 * plain[name] + 0.7 * delta[name], 1e-14)


def test_what_is_undefined_is_refused() -> None:
    toy = toy_of(FedCM())
    refused: list[tuple[dict[str, Any], str]] = [
        ({"momentum": 0.9}, r"FedCM's momentum is Delta.*train\.momentum=0\.9.*set train\.momentum=0"),
        ({"momentum": 0.9, "nesterov": True}, r"FedCM does without train\.nesterov"),
        ({"momentum": 0.9, "dampening": 0.5}, r"FedCM does without train\.dampening"),
        ({"optimizer": "adam"}, r"FedCM needs train\.optimizer=sgd, not adam"),
    ]
    for changes, words in refused:
        with pytest.raises(ConfigError, match=words):
            FedCM().check(toy.task, toy_of(FedCM(), TRAIN.model_copy(update=changes)).context)
    FedCM().check(toy.task, toy.context)
    for alpha in (0.0, 1.1):
        with pytest.raises(ValueError, match="alpha"):
            FedCM(alpha=alpha)


def test_remarks() -> None:
    assert not FedCM().remarks(toy_of(FedCM()).context)
    (said,) = FedCM().remarks(toy_of(FedCM(), TRAIN.model_copy(update={"max_grad_norm": 10.0})).context)
    assert "train.max_grad_norm" in said
