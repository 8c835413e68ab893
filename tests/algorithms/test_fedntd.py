"""FedNTD: invariants NTD, the term by hand, and what is not forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedntd import FedNTD, not_true
from algorithms.parts.transfer import distillation
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import copy, leaves, map_leaves
from rayfl.tasks.base import Batch
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def some_logits(seed: int, classes: int = 4) -> Tensor:
    return 3 * torch.randn(7, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(classes: int = 4) -> Batch:
    return Batch(torch.zeros(7, 5), torch.arange(7) % classes)


def term(student: Tensor, teacher: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
    return distillation(not_true(student, batch.y), not_true(teacher, batch.y), batch, temperature)


@MODES
def test_inv_ntd_1_weight_zero_is_fedavg(mode: str) -> None:
    distilled, plain = (toy_of(algorithm, mode=mode) for algorithm in (FedNTD(distillation_weight=0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(distilled.step(), plain.step())


@MODES
def test_inv_ntd_2_of_two_classes_it_is_fedavg(mode: str) -> None:
    assert abs(float(term(some_logits(0, 2), some_logits(1, 2), batch_of(2)))) < 1e-15
    dataset = random_clients(SIZES, classes=2)
    distilled, plain = (
        toy_of(a, dataset=dataset, task=two_layers(classes=2), mode=mode)
        for a in (FedNTD(distillation_weight=9), FedAvg())
    )
    for _ in range(TRAIN.rounds):
        assert_close(distilled.step(), plain.step(), 1e-12)


def test_inv_ntd_3_the_true_logit_has_no_gradient() -> None:
    student, batch = some_logits(0).requires_grad_(), batch_of()
    (gradient,) = torch.autograd.grad(term(student, some_logits(1), batch, 3.0), student)
    true = gradient.gather(1, batch.y[:, None])
    assert torch.equal(true, torch.zeros_like(true))
    assert (gradient.abs().sum(1) > 1e-3).all()


@MODES
def test_inv_ntd_4_a_single_step_is_fedavg(mode: str) -> None:
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
    distilled, plain = (toy_of(a, train, mode=mode) for a in (FedNTD(distillation_weight=50.0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_close(distilled.step(), plain.step(), 1e-12)
    logits = some_logits(0).requires_grad_()
    value = term(logits, logits.detach(), batch_of())
    assert float(value.detach()) == 0
    assert torch.equal(torch.autograd.grad(value, logits)[0], torch.zeros_like(logits))


def test_inv_ntd_5_only_differences_of_the_teachers_other_logits_count() -> None:
    student, teacher, batch = some_logits(0), some_logits(1), batch_of()
    moved = teacher + 7
    assert_close(term(student, moved, batch), term(student, teacher, batch), 1e-12)
    other = teacher.scatter(1, batch.y[:, None], 99.0)
    assert_equal(term(student, other, batch), term(student, teacher, batch))


def test_inv_ntd_6_the_term_is_not_negative() -> None:
    for seed in range(20):
        assert float(term(some_logits(seed), some_logits(seed + 50), batch_of(), 0.5 + seed)) > 0


def test_the_term_is_that_of_the_paper() -> None:
    student, teacher, batch, tau = some_logits(0), some_logits(1), batch_of(), 3.0
    total = 0.0
    for z, g, y in zip(student, teacher, batch.y.tolist(), strict=True):
        others = [c for c in range(4) if c != y]
        q, p = (z[others] / tau).softmax(0), (g[others] / tau).softmax(0)
        total += float((p * (p / q).log()).sum())
    assert abs(float(term(student, teacher, batch, tau)) - tau**2 * total / 7) < 1e-12


def test_the_objective_adds_it_to_the_cross_entropy() -> None:
    task, part = two_layers(), random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    model, received = task.network.initialize(0), task.network.initialize(1)
    value = FedNTD(distillation_weight=0.5, temperature=2.0).objective(model, batch, task, {"received": received}, None)
    expected = task.loss(model, batch) + 0.5 * term(task.logits(model, batch), task.logits(received, batch), batch, 2.0)
    assert_close(value, expected, 1e-12)


def test_the_received_model_runs_in_evaluation_mode() -> None:
    task, part = normalized_layers(), random_clients((6,)).load(0)["train"]
    batch, received = Batch(part.x, part.y), task.network.initialize(1)
    before, model = copy(received), task.network.initialize(0)
    value = FedNTD().objective(copy(model), batch, task, {"received": received}, None)
    student, teacher = task.logits(copy(model), batch), task.network.logits(before, batch.x, training=False)
    assert_close(value, task.loss_of(student, batch) + term(student, teacher, batch, 1.0), 1e-12)
    assert_equal(received, before)


def test_padding_contributes_nothing() -> None:
    task, part = two_layers(), random_clients((6,)).load(0)["train"]
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    model, received = task.network.initialize(0), task.network.initialize(1)
    padded = FedNTD().objective(model, Batch(part.x, part.y, mask), task, {"received": received}, None)
    short = FedNTD().objective(model, Batch(part.x[:4], part.y[:4]), task, {"received": received}, None)
    assert_close(padded, short, 1e-12)


def test_a_single_class_is_no_obstacle() -> None:
    dataset = random_clients(SIZES, classes=1)
    toy = toy_of(FedNTD(), dataset=dataset, task=two_layers(classes=1))
    assert all(torch.isfinite(leaf).all() for _, leaf in leaves(toy.run()))


def test_it_forgets_less_of_the_other_classes() -> None:
    """A client of one class, trained long: the received model's order of the others stays."""
    x, y = (torch.randn(12, 5, generator=torch.Generator().manual_seed(2)).double(), torch.zeros(12).long())
    train = TRAIN.model_copy(update={"local_epochs": 20, "clients_per_round": 1})
    start = map_leaves(lambda leaf: 2 * leaf, two_layers(classes=4).network.initialize(3))
    away = {}
    for weight in (0.0, 5.0):
        toy = toy_of(
            FedNTD(distillation_weight=weight), train, dataset=ListDataset([(x, y)], 4), task=two_layers(classes=4)
        )
        toy.server = {"model": copy(start)}
        trained = toy.step([0])["model"]
        batch = Batch(x, y)
        away[weight] = float(term(toy.task.logits(trained, batch), toy.task.logits(start, batch), batch))
    assert away[5.0] < 0.5 * away[0.0]
