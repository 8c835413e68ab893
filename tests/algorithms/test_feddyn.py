"""FedDyn: invariants DYN, fixture G9, own alphas, buffers, and the state of clients not sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.feddyn import FedDyn
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, map_leaves, num_bytes, subtract, tensors
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import Quadratic, normalized_layers, softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0], [1, 3], [0, 1, 2, 3], [2], [0, 3])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def exact(alpha: float, points: tuple[float, ...] = (0.0, 4.0), start: float = 1.0, **options: Any) -> Toy:
    """QUAD, on which one full-batch step of length 1 / (1 + alpha) minimises the local loss."""
    train = TrainConfig(rounds=9, clients_per_round=1, local_epochs=1, batch_size=None, lr=1 / (1 + alpha))
    algorithm = FedDyn(alpha=alpha, **options)
    return Toy(algorithm, quadratic_clients(points, range(1, len(points) + 1)), Quadratic(start=start), train)


def displacements(toy: Toy) -> list[Tree]:
    """d_k of all clients; zero for those that never took part."""
    zero = map_leaves(torch.zeros_like, toy.server["displacement"])
    states = toy.states()
    return [states[k]["displacement"] if k in states else zero for k in range(toy.dataset.num_clients)]


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *leaves: torch.stack(leaves).mean(0), *trees)


def g(toy: Toy, client: int) -> float:
    return -toy.algorithm.alpha * float(displacements(toy)[client]["theta"])


def h(toy: Toy) -> float:
    return -toy.algorithm.alpha * float(toy.server["displacement"]["theta"])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("hosts", [1, 3])
def test_inv_dyn_1_the_server_holds_the_mean_of_what_clients_hold(adaptive: bool, hosts: int) -> None:
    toy = toy_of(FedDyn(alpha=0.1, alpha_adaptive=adaptive), hosts=hosts)
    for cohort in COHORTS:
        toy.step(cohort)
        assert_close(toy.server["displacement"], mean(displacements(toy)), 1e-12)
        assert max(float(leaf.abs().max()) for leaf in tensors(toy.server["displacement"])) > 1e-3


def test_inv_dyn_1_displacements_add_up_what_clients_moved() -> None:
    """A client alone in its round moves by what the server holds, less the old and the new displacement of all."""
    toy = toy_of(FedDyn(alpha=0.1, alpha_adaptive=True))
    total = map_leaves(torch.zeros_like, toy.server["displacement"])
    for cohort in ([1], [2], [1], [1]):
        before = copy(toy.server["model"])
        server = toy.step(cohort)
        moved = subtract(subtract(server["model"], server["displacement"]), before)
        total = add_scaled(total, moved, 1.0 if cohort == [1] else 0.0)
    assert_close(displacements(toy)[1], total, 1e-12)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
def test_inv_dyn_2_after_an_exact_solve_g_is_the_gradient(alpha: float) -> None:
    points = (0.0, 4.0, -3.0)
    toy = exact(alpha, points)
    for cohort in ([0, 1], [1, 2], [0, 1, 2], [0]):
        old, received = [g(toy, k) for k in range(3)], float(toy.server["model"]["theta"])
        server = toy.step(cohort)
        minima = {k: (points[k] + old[k] + alpha * received) / (1 + alpha) for k in cohort}
        for k in range(3):
            assert abs(g(toy, k) - (minima[k] - points[k] if k in cohort else old[k])) < 1e-12
        assert abs(h(toy) - np.mean([g(toy, k) for k in range(3)])) < 1e-12
        assert abs(float(server["model"]["theta"]) - (np.mean(list(minima.values())) - h(toy) / alpha)) < 1e-11


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_inv_dyn_3_fixed_point(alpha: float, adaptive: bool) -> None:
    points, average = (0.0, 4.0, 5.0), 3.0
    toy = exact(alpha, points, start=average, alpha_adaptive=adaptive)
    alphas = {k: alpha * 2 / (k + 1) if adaptive else alpha for k in range(3)}  # n_k = k + 1, 2 on average
    states = toy.client_hosts[0].states
    own = {k: torch.tensor([-(average - a) / alphas[k]], dtype=torch.float64) for k, a in enumerate(points)}
    for k, displacement in own.items():
        states.replace(k, {"displacement": {"theta": displacement}}, 0)
    for _ in range(3):
        server = toy.step([0, 1, 2])
        assert abs(float(server["model"]["theta"]) - average) < 1e-11
        assert abs(h(toy)) < 1e-12
        for k in range(3):
            assert abs(float(displacements(toy)[k]["theta"] - own[k])) < 1e-11


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_dyn_4_as_alpha_vanishes_the_first_local_update_is_fedavg(mode: str) -> None:
    for client in range(4):
        dyn, plain = (toy_of(a, mode=mode) for a in (FedDyn(alpha=1e-13), FedAvg(aggregation="uniform")))
        dyn.step([client])
        trained = subtract(dyn.server["model"], dyn.server["displacement"])
        assert_close(trained, plain.step([client])["model"], 1e-10)


def test_inv_dyn_4_alpha_zero_is_refused() -> None:
    toy = toy_of(FedDyn(alpha=0.5))
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 0.*algorithm=fedavg"):
        FedDyn(alpha=0).check(toy.task, toy.context)
    FedDyn(alpha=1e-9).check(toy.task, toy.context)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
def test_inv_dyn_5_one_client_is_relaxed_by_its_own_displacement(alpha: float) -> None:
    toy = Toy(FedDyn(alpha=alpha), random_clients((9,)), two_layers(), TRAIN)
    start = copy(toy.server["model"])
    server = toy.step([0])
    moved = displacements(toy)[0]
    assert_close(server["displacement"], moved, 1e-12)
    assert_close(server["model"], add_scaled(start, moved, 2.0), 1e-12)
    assert max(float(leaf.abs().max()) for leaf in tensors(moved)) > 1e-2


def test_g9() -> None:
    toy = exact(0.5)
    received = 1.0
    for thetas, gradients, offset, model in (
        ((1 / 3, 3.0), (1 / 3, -1.0), -1 / 3, 7 / 3),
        ((1.0, 25 / 9), (1.0, -11 / 9), -1 / 9, 19 / 9),
        (None, None, None, 55 / 27),
    ):
        old = [g(toy, k) for k in range(2)]
        toy.step([0, 1])
        assert abs(float(toy.server["model"]["theta"]) - model) < 1e-9
        if thetas is not None:
            for k in range(2):
                assert abs(g(toy, k) - gradients[k]) < 1e-9
                assert abs(received - (g(toy, k) - old[k]) / 0.5 - thetas[k]) < 1e-9
            assert abs(h(toy) - offset) < 1e-9
        received = model
    for _ in range(40):
        toy.step([0, 1])
    assert abs(float(toy.server["model"]["theta"]) - 2) < 1e-9


def test_objective_has_the_papers_gradient() -> None:
    """grad F - g + alpha (theta - w)."""
    task, alpha = two_layers(), 0.3
    model, received, drift = (task.network.initialize(seed) for seed in range(3))
    part = random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    frozen = {"anchor": subtract(received, drift), "alpha": torch.tensor(alpha, dtype=torch.float64)}
    found = torch.autograd.grad(FedDyn().objective(moved, batch, task, frozen, None), list(moved.values()))
    plain = torch.autograd.grad(task.loss(moved, batch), list(moved.values()))
    for name, total, gradient in zip(model, found, plain, strict=True):
        old_gradient = -alpha * drift[name]
        assert_close(total, gradient - old_gradient + alpha * (model[name] - received[name]), 1e-12)


def test_own_alphas_are_in_inverse_proportion_to_the_samples() -> None:
    toy = toy_of(FedDyn(alpha=0.2, alpha_adaptive=True))
    found = toy.algorithm.own_alphas([1, 2], toy.federation)
    assert set(found) == {1, 2}
    for k, payload in found.items():
        assert abs(payload["alpha"] - 0.2 * sum(SIZES) / (len(SIZES) * SIZES[k])) < 1e-15
    # n_k alpha_k is the same for all: a client with the average number of samples has alpha itself
    equal = [
        Toy(FedDyn(alpha=0.2, alpha_adaptive=flag), random_clients((8,) * 4), two_layers(), TRAIN)
        for flag in (False, True)
    ]
    for cohort in COHORTS:
        assert_equal(*(toy.step(cohort) for toy in equal))


def test_own_alpha_is_the_clients_and_costs_a_number() -> None:
    toy = exact(0.5, alpha_adaptive=True)  # one and two samples: alpha_k = 0.75 and 0.375
    toy.step([0, 1])
    lr = 1 / 1.5
    for k, point in enumerate((0.0, 4.0)):
        assert abs(float(displacements(toy)[k]["theta"]) + lr * (1 - point)) < 1e-12  # w = theta: no pull yet
    before, old = float(toy.server["model"]["theta"]), displacements(toy)
    toy.step([0, 1])
    for k, (point, alpha) in enumerate(((0.0, 0.75), (4.0, 0.375))):
        step = -lr * (before - point + alpha * float(old[k]["theta"]))
        assert abs(float(displacements(toy)[k]["theta"]) - float(old[k]["theta"]) - step) < 1e-12
    assert toy.federation.traffic.down == 2 * (num_bytes(toy.server["model"]) + 8)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(adaptive: bool, double: bool) -> None:
    algorithm = FedDyn(alpha=0.3, alpha_adaptive=adaptive)
    assert_modes_agree(algorithm, SIZES, TRAIN, double, 1e-10 if double else 1e-4)


@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_without_a_step_nothing_changes(idle: dict[str, Any]) -> None:
    toy = toy_of(FedDyn(), TRAIN.model_copy(update=idle))
    before = copy(toy.server)
    for cohort in ([0, 1, 2, 3], [1, 2]):
        assert_equal(toy.step(cohort), before)


def test_buffers_are_averaged_and_never_displaced() -> None:
    toy = Toy(FedDyn(alpha=1e-13), random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    plain = Toy(FedAvg(aggregation="uniform"), toy.dataset, toy.task, TRAIN)
    toy.step([0, 1])
    plain.step([0, 1])
    network = toy.task.network
    assert set(toy.server["displacement"]) == set(toy.states()[0]["displacement"]) == set(network.parameter_names)
    for name in network.buffer_names:
        assert_close(toy.server["model"][name], plain.server["model"][name], 1e-10)


def test_row_of_the_mean_is_the_mean_of_what_was_trained() -> None:
    toy = toy_of(FedDyn(alpha=0.1))
    for cohort in ([0, 2], [1]):
        toy.step(cohort)
    trained = toy.federation.trained_scores[1]["test"]["local"].vector
    rows = toy.scores()[1]
    assert set(rows) == {"global", "mean"}
    assert np.allclose(rows["mean"].vector, trained, rtol=0, atol=1e-10)
    assert not np.allclose(rows["global"].vector, trained, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_reaches_the_minimum_of_the_mean_loss_where_fedavg_does_not() -> None:
    """Unlike clients and many local steps: federated averaging stops where the mean gradient is not zero."""
    train = TrainConfig(rounds=80, clients_per_round="all", local_epochs=10, batch_size=None, lr=0.5, weight_decay=0.05)
    lengths = []
    for algorithm in (FedDyn(alpha=0.3), FedAvg(aggregation="uniform")):
        toy = Toy(algorithm, random_clients(SIZES), softmax_regression(), train)
        model = {name: leaf.clone().requires_grad_() for name, leaf in toy.run()["model"].items()}
        parts = [toy.dataset.load(k)["train"] for k in range(4)]
        loss = sum(toy.task.loss(model, Batch(part.x, part.y)) for part in parts) / 4
        loss = loss + 0.025 * sum((leaf**2).sum() for leaf in model.values())
        gradient = torch.autograd.grad(loss, list(model.values()))
        lengths.append(float(torch.cat([leaf.flatten() for leaf in gradient]).norm()))
    assert lengths[0] < 1e-6
    assert lengths[1] > 0.03
