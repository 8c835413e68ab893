"""FedSAM: limits that are federated averaging, steps by hand, running statistics, dropout, whole rounds by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedsam import FedSAM
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Batch, begin_step
from tests.support.toy_networks import Quadratic, normalized_layers, recurrent_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=2, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
ADAPTIVE = pytest.mark.parametrize("adaptive", [False, True])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def sample(size: int = 6) -> Batch:
    part = random_clients([size]).load(0)["train"]
    return Batch(part.x, part.y)


@MODES
def test_inv_sam_1_of_radius_0_it_is_fedavg(mode: str) -> None:
    sharp, plain = (toy_of(a, mode=mode) for a in (FedSAM(radius=0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(sharp.step(), plain.step())


@MODES
@ADAPTIVE
def test_inv_sam_2_a_vanishing_radius_is_fedavg_with_statistics_and_dropout(mode: str, adaptive: bool) -> None:
    methods = FedSAM(radius=1e-14, adaptive=adaptive), FedAvg()
    sharp, plain = (toy_of(a, mode=mode, task=normalized_layers(0.4)) for a in methods)
    for _ in range(TRAIN.rounds):
        assert_close(sharp.step(), plain.step(), 1e-12)


@MODES
def test_inv_sam_3_a_step_on_a_quadratic(mode: str) -> None:
    """Of |theta - a|^2 / 2 the gradient is theta - a, and it is longer by rho where the step takes it."""
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = Toy(FedSAM(radius=0.5), quadratic_clients([[4.0, 5.0]], [6]), Quadratic(2), train, mode=mode)
    # from (1, 1): g = (-3, -4) of norm 5, e = (-0.3, -0.4)
    assert toy.step()["model"]["theta"].tolist() == pytest.approx([1 + 0.1 * 3.3, 1 + 0.1 * 4.4], abs=1e-15)


@MODES
def test_inv_sam_4_where_the_gradient_is_0_nothing_moves(mode: str) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=3, batch_size=None, lr=0.1)
    for adaptive in (False, True):
        method = FedSAM(radius=2.0, adaptive=adaptive)
        toy = Toy(method, quadratic_clients([[1.0, 1.0]], [4]), Quadratic(2), train, mode=mode)
        assert toy.step()["model"]["theta"].tolist() == [1.0, 1.0]


@ADAPTIVE
def test_inv_sam_5_the_perturbation_is_that_of_the_papers(adaptive: bool) -> None:
    rng = np.random.default_rng(0)
    w = {"a.weight": rng.normal(size=(3, 2)), "a.bias": rng.normal(size=3), "r.bias_hh_l0": rng.normal(size=2)}
    g = {name: rng.normal(size=leaf.shape) for name, leaf in w.items()}
    units = {name: np.abs(w[name]) + 0.3 if adaptive and name == "a.weight" else np.ones_like(w[name]) for name in w}
    norm = np.sqrt(sum(float(((units[name] * g[name]) ** 2).sum()) for name in w))
    method = FedSAM(radius=0.7, adaptive=adaptive, weight_floor=0.3)
    found = method.perturbation(*(map_leaves(torch.from_numpy, tree) for tree in (w, g)))
    for name in w:
        assert np.abs(found[name].numpy() - 0.7 * units[name] ** 2 * g[name] / norm).max() < 1e-15
    # measured in units of the weights it has length rho
    length = np.sqrt(sum(float(((found[name].numpy() / units[name]) ** 2).sum()) for name in w))
    assert length == pytest.approx(0.7, abs=1e-14)


@ADAPTIVE
def test_inv_sam_6_scaled_layers_are_perturbed_alike_by_asam_alone(adaptive: bool) -> None:
    """A ReLU network is the same where one layer is doubled and the next halved; so is ASAM's loss nearby."""
    task, batch = two_layers(), sample()
    model = task.network.initialize(1)
    for name in ("inner.bias", "head.bias"):
        model[name] = torch.zeros_like(model[name])
    factors = {"inner.weight": 2.0, "inner.bias": 2.0, "head.weight": 0.5, "head.bias": 1.0}
    scaled = {name: factors[name] * leaf for name, leaf in model.items()}
    method = FedSAM(radius=0.3, adaptive=adaptive, weight_floor=0.0)
    losses = []
    for point in (model, scaled):
        gradient = torch.func.grad(lambda m: task.loss(m, batch))(point)
        apart = {n: leaf for n, leaf in method.perturbation(point, gradient).items() if n.endswith("weight")}
        losses.append(float(task.loss({**point, **{n: point[n] + leaf for n, leaf in apart.items()}}, batch)))
    # the biases, which ASAM measures in absolute units, take part in the norm alone
    assert (abs(losses[0] - losses[1]) < 0.02 * losses[0]) == adaptive


@pytest.mark.parametrize("make", [two_layers, normalized_layers, recurrent_layers])
@ADAPTIVE
def test_the_gradient_is_that_at_the_perturbed_point(make: Any, adaptive: bool) -> None:
    task, batch, method = make(), sample(), FedSAM(radius=0.4, adaptive=adaptive)
    model = task.network.initialize(1)
    names = task.network.parameter_names
    first = gradient_of(task, model, batch)
    apart = method.perturbation({name: model[name] for name in names}, first)
    expected = gradient_of(task, {**model, **{name: model[name] + apart[name] for name in names}}, batch)
    assert_close(gradient_of(task, model, batch, method), expected, 1e-13)
    assert max(float((first[name] - expected[name]).abs().max()) for name in names) > 1e-3


def gradient_of(task: Any, model: Tree, batch: Batch, method: FedSAM | None = None) -> Tree:
    """The gradient of the loss, or of the method's objective, with respect to the parameters."""
    moved = {n: leaf.clone().requires_grad_(n in task.network.parameter_names) for n, leaf in model.items()}
    value = task.loss(moved, batch) if method is None else method.objective(moved, batch, task, None, None)
    found = torch.autograd.grad(value, [moved[name] for name in task.network.parameter_names])
    return dict(zip(task.network.parameter_names, found, strict=True))


@MODES
def test_running_statistics_are_recorded_once_a_step_and_are_those_at_w(mode: str) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    data = random_clients((9, 5))
    sharp, plain = (
        toy_of(a, train, task=normalized_layers(), dataset=data, mode=mode) for a in (FedSAM(radius=3.0), FedAvg())
    )
    left, right = (toy.step()["model"] for toy in (sharp, plain))
    for name in sharp.task.network.buffer_names:
        assert_close(left[name], right[name], 1e-13)
    assert (left["inner.weight"] - right["inner.weight"]).abs().max() > 1e-3


def test_both_passes_have_the_same_dropout() -> None:
    task, batch = normalized_layers(0.5), sample(12)
    model, values = task.network.initialize(0), []
    for method in (None, FedSAM(radius=1e-9)):
        begin_step(task, torch.tensor(7))
        found = task.loss(copy(model), batch) if method is None else method.objective(copy(model), batch, task)
        values.append(float(found))
    assert values[0] == pytest.approx(values[1], rel=1e-7)


OPTIMIZERS: list[dict[str, Any]] = [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@MODES
@ADAPTIVE
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=["momentum", "adam"])
def test_rounds_are_those_of_plain_pytorch(changes: dict[str, Any], adaptive: bool, mode: str) -> None:
    """Whole mini-batches, with unequal clients and partial participation."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 3, "momentum": 0.0, **changes})
    toy = toy_of(FedSAM(radius=0.2, adaptive=adaptive, weight_floor=0.1), train, mode=mode)
    expected = copy(toy.server["model"])
    for cohort in ([0, 2], [1, 2, 3]):
        parts = [toy.dataset.load(k)["train"] for k in cohort]
        expected = by_hand(expected, [Batch(part.x, part.y) for part in parts], adaptive, train)
        assert_close(toy.step(cohort)["model"], expected, 1e-12)


def by_hand(server: Tree, clients: list[Batch], adaptive: bool, train: TrainConfig) -> Tree:
    """A round of three local steps: the weights are moved, and moved back before the optimizer's step."""
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for batch in clients:
        w = {name: leaf.clone().requires_grad_() for name, leaf in server.items()}
        if train.optimizer == "sgd":
            rule: Any = torch.optim.SGD(w.values(), train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
        else:
            rule = torch.optim.Adam(w.values(), train.lr, weight_decay=train.weight_decay)
        for _ in range(3):
            before = {name: leaf.detach().clone() for name, leaf in w.items()}
            slopes = torch.autograd.grad(plain_loss(w, batch), list(w.values()))
            units = [
                w[n].detach().abs() + 0.1 if adaptive and n.endswith("weight") else torch.tensor(1.0).double()
                for n in w
            ]
            norm = torch.cat([(u * g).flatten() for u, g in zip(units, slopes, strict=True)]).norm()
            with torch.no_grad():
                for leaf, unit, slope in zip(w.values(), units, slopes, strict=True):
                    leaf += 0.2 * unit**2 * slope / norm
            rule.zero_grad()
            plain_loss(w, batch).backward()
            with torch.no_grad():
                for name, leaf in w.items():
                    leaf.copy_(before[name])
            rule.step()
        for name, leaf in w.items():
            mean[name] += leaf.detach() * (len(batch.y) / sum(len(one.y) for one in clients))
    return mean


def plain_loss(w: Tree, batch: Batch) -> Any:
    hidden = torch.relu(batch.x @ w["inner.weight"].T + w["inner.bias"])
    return F.cross_entropy(hidden @ w["head.weight"].T + w["head.bias"], batch.y)


@ADAPTIVE
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped_on_ragged_mini_batches(make: Any, adaptive: bool) -> None:
    looped, stacked = (
        toy_of(FedSAM(radius=0.3, adaptive=adaptive), task=make(), mode=mode) for mode in ("looped", "vectorized")
    )
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-11)


def test_a_network_that_cannot_be_stacked_takes_the_same_steps() -> None:
    toys = [toy_of(FedSAM(radius=0.3), task=normalized_layers()) for _ in range(2)]
    toys[1].task.network.refuse_vectorization("for this test")
    for cohort in ([0, 1], [1, 3]):
        assert_close(toys[0].step(cohort), toys[1].step(cohort), 1e-12)
