"""SCAFFOLD: invariants SCA, fixture G8, both options, momentum, and the state of clients not sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.scaffold import Scaffold
from rayfl.params import Tree, add_scaled, copy, interpolate, map_leaves
from rayfl.tasks.base import Batch
from tests.support.scaffold_toys import ONE_STEP, SIZES, TRAIN, controls, mean, quad, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients


def gradient_of(toy: Toy, client: int, model: Tree) -> Tree:
    """The gradient of a client's mean loss over all its samples."""
    part = toy.dataset.load(client)["train"]
    point = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    parts = torch.autograd.grad(toy.task.loss(point, Batch(part.x, part.y)), list(point.values()))
    return dict(zip(point, parts, strict=True))


def give_controls(toy: Toy, values: dict[int, Tree]) -> None:
    """Puts control variates into the states of a federation of one host."""
    for client, control in values.items():
        toy.client_hosts[0].states.replace(client, {"control": control}, 0)


@pytest.mark.parametrize("option", ["option2", "option1"])
def test_inv_sca_1_control_is_the_mean_of_the_clients_controls(option: str) -> None:
    toy = toy_of(Scaffold(control_update=option))  # type: ignore[arg-type]
    for cohort in ([0], [1, 3], [0, 1, 2, 3], [2], [0, 3]):
        toy.step(cohort)
        assert_close(toy.server["control"], mean(controls(toy)), 1e-12)
        assert max(float(leaf.abs().max()) for leaf in toy.server["control"].values()) > 1e-3


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_sca_2_round_0_is_fedavg(mode: str) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.01})
    for cohort in ([0], [3], [0, 2], [0, 1, 2, 3]):
        corrected, plain = (
            toy_of(algorithm, train, mode=mode) for algorithm in (Scaffold(), FedAvg(aggregation="uniform"))
        )
        assert_equal(corrected.step(cohort)["model"], plain.step(cohort)["model"])


def test_inv_sca_3_single_steps_of_everybody_are_distributed_sgd() -> None:
    toy = toy_of(Scaffold(), ONE_STEP)
    model = copy(toy.server["model"])
    for _ in range(4):
        gradients = [gradient_of(toy, client, model) for client in range(4)]
        model = add_scaled(model, mean(gradients), -ONE_STEP.lr)
        assert_close(toy.step([0, 1, 2, 3])["model"], model, 1e-12)


def test_inv_sca_4_after_one_step_the_control_is_the_gradient_received() -> None:
    toy = toy_of(Scaffold(), ONE_STEP)
    for cohort in ([0, 1], [1, 2], [0, 1, 3]):
        received = copy(toy.server["model"])
        toy.step(cohort)
        for client in cohort:
            assert_close(controls(toy)[client], gradient_of(toy, client, received), 1e-12)


def test_inv_sca_5_fixed_point() -> None:
    points, average = [0.0, 4.0, 5.0], 3.0
    for epochs in (1, 2, 7):
        toy = quad(Scaffold(), points, [1, 1, 1], start=average, local_epochs=epochs)
        own = {k: {"theta": torch.tensor([average - a], dtype=torch.float64)} for k, a in enumerate(points)}
        give_controls(toy, own)
        for _ in range(3):
            toy.step()
            assert_close(toy.server["model"]["theta"], torch.tensor([average], dtype=torch.float64), 1e-12)
            assert_close(toy.server["control"]["theta"], torch.zeros(1, dtype=torch.float64), 1e-12)
            for client in range(3):
                assert_close(toy.states()[client]["control"], own[client], 1e-12)


@pytest.mark.slow
def test_inv_sca_5_converges_where_fedavg_with_unequal_steps_does_not() -> None:
    unequal = {"batch_size": 1, "rounds": 150, "local_epochs": 1}
    corrected = quad(Scaffold(), [0.0, 4.0], [1, 4], **unequal)
    plain = quad(FedAvg(aggregation="uniform"), [0.0, 4.0], [1, 4], **unequal)
    assert abs(float(corrected.run()["model"]["theta"]) - 2) < 1e-8
    assert abs(float(plain.run()["model"]["theta"]) - 2) > 0.5


def test_g8() -> None:
    toy = quad(Scaffold(), [0.0, 4.0], [1, 1])
    for model, control, first, second in (
        (1.19, -0.95, 0.95, -2.85),
        (1.3439, -0.7695, 1.2255, -2.7645),
        (1.468559, -0.623295, 1.376455, -2.623045),
    ):
        toy.step()
        found = [toy.server["model"], toy.server["control"], *controls(toy, range(2))]
        for tree, value in zip(found, (model, control, first, second), strict=True):
            assert abs(float(tree["theta"]) - value) < 1e-9


def test_option1_control_is_the_full_gradient_at_the_received_model() -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.01})
    toy = toy_of(Scaffold(control_update="option1"), train)
    for cohort in ([0, 1], [1, 3]):
        received = copy(toy.server["model"])
        toy.step(cohort)
        for client in cohort:
            expected = add_scaled(gradient_of(toy, client, received), received, 0.01)
            assert_close(controls(toy)[client], expected, 1e-12)


def test_options_agree_after_a_single_step_with_weight_decay() -> None:
    train = ONE_STEP.model_copy(update={"weight_decay": 0.01})
    first, second = (toy_of(Scaffold(control_update=option), train) for option in ("option1", "option2"))
    for cohort in ([0, 1], [1, 3], [0, 1, 2, 3]):
        assert_close(first.step(cohort), second.step(cohort), 1e-12)


def test_the_least_number_of_local_steps_counts_in_the_control() -> None:
    train = ONE_STEP.model_copy(update={"min_local_steps": 3})
    more = toy_of(Scaffold(), train)
    epochs = toy_of(Scaffold(), ONE_STEP.model_copy(update={"local_epochs": 3}))
    for cohort in ([0, 1], [1, 3]):
        assert_equal(more.step(cohort), epochs.step(cohort))
        assert_equal(more.states(), epochs.states())


def test_server_lr_steps_towards_the_mean() -> None:
    full, half = (toy_of(Scaffold(server_lr=rate)) for rate in (1.0, 0.5))
    start = copy(full.server["model"])
    end = full.step([0, 1])
    assert_close(half.step([0, 1])["model"], interpolate(start, end["model"], 0.5), 1e-12)
    assert_equal(half.server["control"], end["control"])


def test_controls_of_clients_not_sampled_persist() -> None:
    toy = toy_of(Scaffold(), hosts=2)
    for cohort in ([0, 1], [2, 3], [0, 2], [1, 3]):
        before = toy.states()
        toy.step(cohort)
        after = toy.states()
        for client, state in before.items():
            if client in cohort:
                assert not torch.equal(after[client]["control"]["head.weight"], state["control"]["head.weight"])
            else:
                assert_equal(after[client], state)
        assert set(after) == set(before) | set(cohort)


@pytest.mark.parametrize("option", ["option2", "option1"])
@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_without_a_step_nothing_changes(option: str, idle: dict[str, Any]) -> None:
    toy = Toy(
        Scaffold(control_update=option),  # type: ignore[arg-type]
        random_clients(SIZES, dtype=torch.float32),
        two_layers(double=False),
        TRAIN.model_copy(update=idle),
    )
    own = {k: map_leaves(lambda leaf, k=k: leaf + k + 1, toy.server["control"]) for k in range(4)}
    give_controls(toy, own)
    before = copy(toy.server)
    for cohort in ([0, 1, 2, 3], [1, 2]):
        assert_equal(toy.step(cohort), before)
        for client in range(4):
            assert_equal(toy.states()[client]["control"], own[client])


@pytest.mark.parametrize("option", ["option2", "option1"])
def test_vectorized_agrees_with_looped(option: str) -> None:
    train = TRAIN.model_copy(update={"momentum": 0.5, "weight_decay": 0.01})
    looped, stacked = (
        toy_of(Scaffold(control_update=option, momentum_on_corrected=True), train, mode=mode)  # type: ignore[arg-type]
        for mode in ("looped", "vectorized")
    )
    for cohort in ([0, 1, 2], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


def noisy(option: str, server_lr: float = 1.0) -> Toy:
    algorithm = Scaffold(control_update=option, server_lr=server_lr)  # type: ignore[arg-type]
    return Toy(algorithm, random_clients((8, 12, 6)), normalized_layers(0.5), TRAIN)


@pytest.mark.parametrize("option", ["option2", "option1"])
def test_buffers_are_averaged_and_never_corrected(option: str) -> None:
    toys = [noisy(option, server_lr) for server_lr in (1.0, 0.5)]
    network = toys[0].task.network
    plain = Toy(FedAvg(aggregation="uniform"), toys[0].dataset, toys[0].task, TRAIN)
    plain.step([0, 1])
    for toy in toys:
        toy.step([0, 1])
        assert set(toy.server["control"]) == set(network.parameter_names)
        assert set(toy.states()[0]["control"]) == set(network.parameter_names)
        assert set(toy.server["model"]) == set(network.parameter_names) | set(network.buffer_names)
        for name in network.buffer_names:
            assert torch.equal(toy.server["model"][name], plain.server["model"][name])


def test_option1_with_dropout_is_reproducible() -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        toy = noisy("option1")
        toy.run(2)
        assert torch.equal(torch.random.get_rng_state(), before)
        states.append(toy.states())
    assert_equal(*states)
