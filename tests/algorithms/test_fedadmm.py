"""FedADMM: invariants ADMM, an oracle in plain PyTorch, FedDyn as a special case, first messages and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedadmm import FedADMM
from algorithms.fedavg import FedAvg
from algorithms.feddyn import FedDyn
from algorithms.fedprox import FedProx
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, map_leaves, num_bytes, subtract, tensors
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0], [1, 3], [0, 1, 3], [3, 2], [0, 2])
"""Client 2 is sampled for the first time in round 3."""
STARTS = pytest.mark.parametrize("start", ["received", "own"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), **{"task": two_layers(), "train": train, **options})


def augmented(toy: Toy, initial: Tree) -> list[Tree]:
    """w_i + y_i / rho of all clients."""
    states = toy.states()
    return [
        add_scaled(states[k]["primal"], states[k]["dual"], 1 / toy.algorithm.rho) if k in states else initial
        for k in range(toy.dataset.num_clients)
    ]


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *leaves: torch.stack(leaves).mean(0), *trees)


@STARTS
@pytest.mark.parametrize("hosts", [1, 3])
def test_inv_admm_1_theta_is_the_mean_of_all_augmented_models(start: Any, hosts: int) -> None:
    toy = toy_of(FedADMM(rho=0.1, start=start), hosts=hosts)
    initial = copy(toy.server["model"])
    for cohort in COHORTS:
        toy.step(cohort)
        assert_close(toy.server["model"], mean(augmented(toy, initial)), 1e-12)
    assert max(float(leaf.abs().max()) for leaf in tensors(subtract(toy.server["model"], initial))) > 1e-2


def oracle(toy: Toy, rho: float, eta: float | None, own_start: bool, cohorts: Any) -> tuple[list[Tree], Any, Any]:
    """Returns theta after each round, and all w_i and y_i, by the paper's equations in loops of plain PyTorch."""
    names = ("inner.weight", "inner.bias", "head.weight", "head.bias")
    theta = {name: toy.server["model"][name].clone() for name in names}
    w = [{name: theta[name].clone() for name in names} for _ in SIZES]
    y = [{name: torch.zeros_like(theta[name]) for name in names} for _ in SIZES]
    found = []
    for round, cohort in enumerate(cohorts):
        total = {name: torch.zeros_like(theta[name]) for name in names}
        for i in cohort:
            part = toy.dataset.load(i)["train"]
            model = {name: (w[i] if own_start else theta)[name].clone().requires_grad_() for name in names}
            sgd = torch.optim.SGD(model.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            steps = 2 * -(-SIZES[i] // 4)
            for index in plan_batches(SIZES[i], 4, steps, toy.context.streams.generator("batches", round, i)).batches(
                CPU
            ):
                hidden = F.linear(part.x[index], model["inner.weight"], model["inner.bias"]).clamp(min=0)
                value = F.cross_entropy(F.linear(hidden, model["head.weight"], model["head.bias"]), part.y[index])
                for name in names:
                    apart = model[name] - theta[name]
                    value = value + (y[i][name] * apart).sum() + rho / 2 * (apart**2).sum()
                sgd.zero_grad()
                value.backward()
                sgd.step()
            for name in names:
                before = w[i][name] + y[i][name] / rho
                w[i][name] = model[name].detach()
                y[i][name] = y[i][name] + rho * (w[i][name] - theta[name])
                total[name] += w[i][name] + y[i][name] / rho - before
        step = (len(cohort) / len(SIZES) if eta is None else eta) / len(cohort)
        theta = {name: theta[name] + step * total[name] for name in names}
        found.append(theta)
    return found, w, y


@STARTS
@pytest.mark.parametrize("eta", [1.0, 0.6, None])
def test_inv_admm_2_rounds_are_those_of_an_oracle_in_plain_pytorch(start: Any, eta: float | None) -> None:
    toy = toy_of(FedADMM(rho=0.3, server_lr=eta, start=start))
    thetas, w, y = oracle(toy, 0.3, eta, start == "own", COHORTS)
    for cohort, theta in zip(COHORTS, thetas, strict=True):
        toy.step(cohort)
        assert_close(toy.server["model"], theta, 1e-12)
    for client, state in toy.states().items():
        assert_close(state, {"primal": w[client], "dual": y[client]}, 1e-12)
    assert len(toy.states()) == len(SIZES)


def test_inv_admm_3_with_all_clients_in_every_round_it_is_feddyn() -> None:
    everyone = list(range(len(SIZES)))
    for eta in (1.0, None):
        admm, dyn = toy_of(FedADMM(rho=0.2, server_lr=eta)), toy_of(FedDyn(alpha=0.2))
        for _ in range(4):
            admm.step(everyone)
            dyn.step(everyone)
            assert_close(admm.server["model"], dyn.server["model"], 1e-12)
        for client in everyone:
            dual, displacement = admm.states()[client]["dual"], dyn.states()[client]["displacement"]
            assert_close(dual, map_leaves(lambda leaf: 0.2 * leaf, displacement), 1e-12)
    admm.step([0])
    dyn.step([0])
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(
        tensors(admm.server["model"]), tensors(dyn.server["model"]), strict=True
    ))  # fmt: skip


@STARTS
def test_inv_admm_4_the_first_round_is_fedprox_and_as_rho_vanishes_fedavg(start: Any) -> None:
    """y_i is 0 and w_i is theta, so that Delta_i is 2 (w_i^+ - theta)."""
    for rho, other in (
        (0.4, FedProx(proximal_weight=0.4, aggregation="uniform")),
        (1e-13, FedAvg(aggregation="uniform")),
    ):
        admm, plain = toy_of(FedADMM(rho=rho, server_lr=0.5, start=start)), toy_of(other)
        assert_close(admm.step([0, 2, 3])["model"], plain.step([0, 2, 3])["model"], 1e-11)


def test_objective_has_the_papers_gradient() -> None:
    """grad f_i + y_i + rho (w - theta)."""
    task, rho = two_layers(), 0.3
    model, theta, dual = (task.network.initialize(seed) for seed in range(3))
    part = random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    value = FedADMM(rho=rho).objective(moved, batch, task, {"received": theta, "dual": dual}, None)
    found = torch.autograd.grad(value, list(moved.values()))
    plain = torch.autograd.grad(task.loss(moved, batch), list(moved.values()))
    for name, total, gradient in zip(model, found, plain, strict=True):
        assert_close(total, gradient + dual[name] + rho * (model[name] - theta[name]), 1e-12)


def test_rho_zero_is_refused() -> None:
    toy = toy_of(FedADMM())
    with pytest.raises(ConfigError, match=r"algorithm\.rho is 0.*algorithm=fedavg"):
        FedADMM(rho=0).check(toy.task, toy.context)
    FedADMM(rho=1e-9).check(toy.task, toy.context)


def test_a_step_of_the_server_with_which_theta_may_run_away_is_told() -> None:
    toy = toy_of(FedADMM())  # two of four clients in a round
    for options in ({}, {"server_lr": 0.5}, {"server_lr": 1.0, "start": "own"}):
        assert not FedADMM(**options).remarks(toy.context)  # type: ignore[arg-type]
    (said,) = FedADMM(server_lr=0.6).remarks(toy.context)
    assert said.startswith("algorithm.server_lr is 0.6, more than |S|/m = 0.5")


@STARTS
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(start: Any, double: bool) -> None:
    assert_modes_agree(FedADMM(rho=0.3, start=start), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@STARTS
@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_without_a_step_nothing_changes(idle: dict[str, Any], start: Any) -> None:
    toy = toy_of(FedADMM(start=start), TRAIN.model_copy(update=idle))
    before = copy(toy.server)
    for cohort in ([0, 1, 2, 3], [1, 2]):
        assert_equal(toy.step(cohort), before)


def test_messages_are_as_long_as_the_model() -> None:
    toy = toy_of(FedADMM(rho=0.1))
    toy.step([1, 2])
    size = num_bytes(toy.server["model"])
    assert toy.federation.traffic.by_client == dict.fromkeys([1, 2], (size, size))


@STARTS
def test_buffers_are_averaged_and_have_no_dual_variables(start: Any) -> None:
    train = TRAIN.model_copy(update={"batch_size": 6})
    algorithm = FedADMM(rho=1e-13, server_lr=0.5, start=start)
    toy = Toy(algorithm, random_clients((8, 12, 6)), normalized_layers(), train)
    plain = Toy(FedAvg(aggregation="uniform"), toy.dataset, toy.task, train)
    toy.step([0, 1])
    plain.step([0, 1])
    network = toy.task.network
    for part in toy.states()[0].values():
        assert set(part) == set(network.parameter_names)
    for name in network.buffer_names:
        assert_close(toy.server["model"][name], plain.server["model"][name], 1e-10)


@STARTS
def test_local_training_begins_with_the_received_buffers(start: Any) -> None:
    train = TRAIN.model_copy(update={"lr": 0.0, "batch_size": None})
    toy = Toy(FedADMM(start=start), random_clients((8, 12)), normalized_layers(), train)
    plain = Toy(FedAvg(aggregation="uniform"), toy.dataset, toy.task, train)
    for cohort in ([0], [1], [0, 1]):
        assert_close(toy.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


@pytest.mark.slow
def test_reaches_the_minimum_of_the_mean_loss_where_fedavg_does_not() -> None:
    """Unlike clients, many local steps, and half of the clients in a round."""
    train = TrainConfig(rounds=240, clients_per_round=2, local_epochs=10, batch_size=None, lr=0.5, weight_decay=0.05)
    lengths = []
    for algorithm in (FedADMM(rho=0.3, server_lr=None), FedAvg(aggregation="uniform")):
        toy = Toy(algorithm, random_clients(SIZES), softmax_regression(), train)
        model = {name: leaf.clone().requires_grad_() for name, leaf in toy.run()["model"].items()}
        parts = [toy.dataset.load(k)["train"] for k in range(4)]
        loss = sum(toy.task.loss(model, Batch(part.x, part.y)) for part in parts) / 4
        loss = loss + 0.025 * sum((leaf**2).sum() for leaf in model.values())
        gradient = torch.autograd.grad(loss, list(model.values()))
        lengths.append(float(torch.cat([leaf.flatten() for leaf in gradient]).norm()))
    assert lengths[0] < 1e-6
    assert lengths[1] > 0.03
