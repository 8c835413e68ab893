"""FedAvgM, FedAdagrad, FedYogi and FedAdam: invariants OPT, the paper's recursions, buffers and their options."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedopt import Adaptive, FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, subtract, tensors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
ADAPTIVE: list[type[Adaptive]] = [FedAdagrad, FedYogi, FedAdam]
METHODS = pytest.mark.parametrize("method", ADAPTIVE)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def vector(*numbers: float) -> Tree:
    return {"theta": torch.tensor(numbers, dtype=torch.float64)}


def path(algorithm: FedOpt, changes: list[Tree], start: Tree) -> tuple[list[Tensor], list[Tree]]:
    """The server's model and moments after each of some mean changes."""
    zeros = {"theta": torch.zeros_like(start["theta"])}
    model, moments = start, algorithm.moments(zeros)
    models, kept = [], []
    for change in changes:
        mean = {"theta": model["theta"] + change["theta"]}
        model, moments = algorithm.stepped(model, mean, moments)
        models.append(model["theta"])
        kept.append(moments)
    return models, kept


def random_changes(count: int = 8, scale: float = 1.0) -> list[Tree]:
    generator = torch.Generator().manual_seed(4)
    return [{"theta": scale * torch.randn(6, generator=generator, dtype=torch.float64)} for _ in range(count)]


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_inv_opt_1_no_momentum_and_a_full_step_is_fedavg(policy: Any, nesterov: bool) -> None:
    stepping = toy_of(FedAvgM(server_momentum=0, server_lr=1, nesterov=nesterov, aggregation=policy))
    plain = toy_of(FedAvg(aggregation=policy))
    for _ in range(TRAIN.rounds):
        assert_equal(stepping.step()["model"], plain.step()["model"])


@METHODS
def test_inv_opt_2_with_a_large_tau_it_is_fedavg(method: type[Adaptive]) -> None:
    tau = 1e9
    stepping, plain = toy_of(method(first_decay=0, server_lr=tau, adaptivity=tau)), toy_of(FedAvg())
    for _ in range(TRAIN.rounds):
        assert_close(stepping.step()["model"], plain.step()["model"], 1e-7)


def test_inv_opt_2_the_difference_is_bounded_and_known() -> None:
    algorithm = FedAdam(first_decay=0, server_lr=1e6, adaptivity=1e6)
    (model,), (moments,) = path(algorithm, [vector(0.2, -0.1)], vector(1.0, 1.1))
    # Delta (1 - sqrt(v) / tau), and sqrt(v) = |Delta| / 10
    expected = torch.tensor([1.2 - 0.2 * 0.02e-6, 1.0 + 0.1 * 0.01e-6], dtype=torch.float64)
    assert_close(model, expected, 1e-12)
    away = (model - torch.tensor([1.2, 1.0], dtype=torch.float64)).abs()
    assert (away <= torch.tensor([0.2, 0.1]) * moments["second"]["theta"].sqrt() / 1e6 + 1e-15).all()


def test_inv_opt_3_adam_without_memory_is_sign_descent() -> None:
    for tau in (1e-3, 1e-9):
        algorithm = FedAdam(first_decay=0, second_decay=0, server_lr=0.3, adaptivity=tau, initial_accumulator=5)
        change = vector(0.2, -0.1, 1e-5)
        (model,), _ = path(algorithm, [change], vector(0.0, 0.0, 0.0))
        delta = change["theta"]
        assert_close(model, 0.3 * delta / (delta.abs() + tau), 1e-12)
        assert (model.abs() <= 0.3).all()
    assert_close(model, 0.3 * delta.sign(), 1e-4)


def test_inv_opt_4_yogi_is_adam_in_the_first_round_and_its_v_moves_slowly() -> None:
    (yogi, *_), seen = path(FedYogi(), random_changes(), vector(*[1.0] * 6))
    (adam, *_), _ = path(FedAdam(), random_changes(), vector(*[1.0] * 6))
    assert_close(yogi, adam, 1e-12)
    before = torch.zeros(6, dtype=torch.float64)
    for moments, change in zip(seen, random_changes(), strict=True):
        v = moments["second"]["theta"]
        assert ((v - before).abs() <= 0.01 * change["theta"].square() + 1e-15).all()
        before = v


def test_inv_opt_5_adagrad_never_forgets() -> None:
    _, seen = path(FedAdagrad(), random_changes(), vector(*[0.0] * 6))
    values = [moments["second"]["theta"] for moments in seen]
    assert all((later >= earlier).all() for earlier, later in pairwise(values))
    (first, *_), _ = path(FedAdagrad(server_lr=0.3, adaptivity=1e-12), random_changes(), vector(*[0.0] * 6))
    assert_close(first, 0.3 * random_changes()[0]["theta"].sign(), 1e-10)


@METHODS
def test_inv_opt_6_v_is_never_negative(method: type[Adaptive]) -> None:
    changes = [{"theta": change["theta"] * 10 ** (1 - t)} for t, change in enumerate(random_changes(12))]
    for start in (0.0, 1e-3, 2.0):
        _, seen = path(method(initial_accumulator=start), changes, vector(*[0.0] * 6))
        assert all((moments["second"]["theta"] >= 0).all() for moments in seen)


@METHODS
def test_inv_opt_7_the_scale_of_the_changes_does_not_matter(method: type[Adaptive]) -> None:
    start = vector(*[1.0] * 6)
    small, _ = path(method(adaptivity=1e-15), random_changes(), start)
    large, _ = path(method(adaptivity=1e-15), random_changes(scale=7.0), start)
    for one, other in zip(small, large, strict=True):
        assert_close(one, other, 1e-9)


def test_inv_opt_7_fedavgm_scales_with_the_changes() -> None:
    start = vector(*[0.0] * 6)
    small, _ = path(FedAvgM(), random_changes(), start)
    large, _ = path(FedAvgM(), random_changes(scale=7.0), start)
    for one, other in zip(small, large, strict=True):
        assert_close(7 * one, other, 1e-9)


ADAPTIVE_PATHS = [
    (FedAdagrad(first_decay=0.9), (1.009950248756, 1.013512028756)),
    (FedAdam(), (1.095238095238, 1.129615561826)),
    (FedYogi(), (1.095238095238, 1.129483674036)),
    (FedAdam(initial_accumulator=1e-6), (1.095126051676, 1.129471059448)),
    (FedAdam(bias_correction=True), (1.095238095238, 1.120761981807)),
    (FedAvgM(), (1.2, 1.28)),
    (FedAvgM(nesterov=True), (1.38, 1.352)),
    (FedAvgM(server_lr=0.5), (1.1, 1.14)),
]


@pytest.mark.parametrize(("algorithm", "expected"), ADAPTIVE_PATHS)
def test_inv_opt_8_known_paths(algorithm: FedOpt, expected: tuple[float, float]) -> None:
    models, _ = path(algorithm, [vector(0.2), vector(-0.1)], vector(1.0))
    for model, value in zip(models, expected, strict=True):
        assert abs(float(model) - value) < 1e-11


@pytest.mark.parametrize("algorithm", [FedAvgM(), *(method() for method in ADAPTIVE)])
def test_inv_opt_9_without_training_a_fresh_server_stays_and_one_with_momentum_moves(algorithm: FedOpt) -> None:
    idle = toy_of(algorithm, TRAIN.model_copy(update={"local_epochs": 0}))
    before = copy(idle.server["model"])
    for _ in range(2):
        assert_equal(idle.step()["model"], before)
    trained = toy_of(algorithm)
    trained.step()
    idle.server = copy(trained.server)
    remembers = not (isinstance(algorithm, Adaptive) and algorithm.first_decay == 0)
    moved = subtract(idle.step()["model"], trained.server["model"])
    assert any(leaf.any() for leaf in tensors(moved)) == remembers


@pytest.mark.parametrize("algorithm", [FedAvgM(), *(method(first_decay=0.9) for method in ADAPTIVE)])
def test_a_run_is_the_recursion_on_what_fedavg_would_have_added(algorithm: FedOpt) -> None:
    toy, plain = toy_of(algorithm), toy_of(FedAvg())
    moments = toy.server["moments"]
    for cohort in ([0, 1], [1, 3], [0, 1, 2, 3]):
        plain.server = {"model": copy(toy.server["model"])}
        plain.round = toy.round
        mean = plain.step(cohort)["model"]
        expected, moments = algorithm.stepped(toy.server["model"], mean, moments)
        toy.step(cohort)
        assert_equal(toy.server["model"], expected)
        assert_equal(toy.server["moments"], moments)


@pytest.mark.parametrize("algorithm", [FedAvgM(server_lr=0.5), FedAdam()])
def test_buffers_are_averaged_and_have_no_moments(algorithm: FedOpt) -> None:
    toy, plain = (toy_of(method, task=normalized_layers()) for method in (algorithm, FedAvg()))
    network = toy.task.network
    toy.step([0, 1])
    plain.step([0, 1])
    for name in network.buffer_names:
        assert torch.equal(toy.server["model"][name], plain.server["model"][name])
    assert set(toy.server["moments"]["first"]) == set(network.parameter_names)
    assert list(toy.server["model"]) == list(plain.server["model"])


def test_private_layers_have_no_moments() -> None:
    train = TRAIN.model_copy(update={"private_norm": "all"})
    toy = toy_of(FedAdam(), train, task=normalized_layers())
    toy.run()
    assert toy.server["moments"]["second"]["norm.weight"].numel() == 0
    assert toy.server["moments"]["second"]["head.weight"].all()


def test_bias_correction_counts_the_steps_that_were_taken() -> None:
    for steps in (1, 2, 5):
        factor = math.sqrt(1 - 0.99**steps) / (1 - 0.9**steps)
        assert FedYogi(bias_correction=True).correction(steps) == pytest.approx(factor)
        assert FedYogi().correction(steps) == 1
    toy = toy_of(FedAdam(bias_correction=True))
    toy.run(3)
    assert toy.server["moments"]["steps"] == 3


def test_an_evaluation_sends_the_model_alone() -> None:
    toy = toy_of(FedAdam())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}
    assert set(toy.scores()[0]) == {"global"}


def test_what_divides_by_zero_is_refused() -> None:
    with pytest.raises(ValidationError):
        FedAdam(adaptivity=0)
    with pytest.raises(ValidationError):
        FedYogi(server_lr=0)
