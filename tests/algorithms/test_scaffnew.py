"""Scaffnew: an oracle that flips a coin after every step, sums of control variates, optima, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.scaffnew import Scaffnew
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, num_bytes, subtract, zeros_like
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
EVERYONE = range(len(SIZES))
TRAIN = TrainConfig(rounds=6, clients_per_round="all", batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
WEIGHTS = pytest.mark.parametrize("weights", ["uniform", "samples"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def control_of(toy: Toy, client: int) -> Tree:
    """h_k after the last communication, which the client computes when it hears of the mean."""
    state = toy.states()[client]
    mean = {name: toy.server["model"][name] for name in state["trained"]}
    control = {name: torch.as_tensor(leaf) for name, leaf in state["control"].items()}
    trained = {name: torch.as_tensor(leaf) for name, leaf in state["trained"].items()}
    return add_scaled(control, subtract(mean, trained), state["factor"])


@WEIGHTS
def test_inv_new_1_rounds_are_what_a_coin_after_every_step_gives(weights: Any) -> None:
    """Algorithm 2, one iteration after the other; h_k is renewed in each of them, also where nobody communicates."""
    p = 0.3
    toy = toy_of(Scaffnew(communication_probability=p, aggregation=weights))
    network, streams = toy.task.network, toy.context.streams
    x = network.initialize(streams.integer("init.global"))
    q = [1 / len(SIZES) if weights == "uniform" else size / sum(SIZES) for size in SIZES]
    own, control = [copy(x) for _ in EVERYONE], [zeros_like(x) for _ in EVERYONE]
    lengths = [Scaffnew(communication_probability=p).steps(toy.context, round) for round in range(6)]
    assert len(set(lengths)) > 2
    for round, length in enumerate(lengths):
        eta, plans = 0.1 * 0.9**round, []
        for k in EVERYONE:
            generator = streams.generator("batches", round, k)
            plans.append(list(plan_batches(SIZES[k], 4, length, generator).batches(CPU)))
        for step, coin in enumerate([False] * (length - 1) + [True]):
            for k in EVERYONE:
                part, index = toy.dataset.load(k)["train"], plans[k][step]
                leaves = {name: leaf.clone().requires_grad_() for name, leaf in own[k].items()}
                loss = F.cross_entropy(network.logits(leaves, part.x[index]), part.y[index])
                for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    own[k][name] = own[k][name] - eta * (g + 0.01 * own[k][name] - control[k][name])
            mean = {name: sum(q[k] * own[k][name] for k in EVERYONE) for name in x}
            for k in EVERYONE:
                after = copy(mean) if coin else own[k]
                control[k] = add_scaled(control[k], subtract(after, own[k]), p / eta)
                own[k] = after
        toy.step(EVERYONE)
        assert_close(toy.server["model"], own[0], 1e-12)
        for k in EVERYONE:
            assert_close(control_of(toy, k), control[k], 1e-11)
    assert max(float(leaf.abs().max()) for leaf in control[0].values()) > 1e-2


def test_inv_new_2_control_variates_cancel() -> None:
    toy = toy_of(Scaffnew(communication_probability=0.5))
    for _ in range(4):
        toy.step(EVERYONE)
        controls = [control_of(toy, k) for k in EVERYONE]
        for name in controls[0]:
            assert float(sum(control[name] for control in controls).abs().max()) < 1e-12
            assert float(controls[0][name].abs().max()) > 1e-6


@MODES
def test_inv_new_3_where_every_step_is_followed_by_a_mean_it_is_gradient_descent(mode: str) -> None:
    """p = 1: control variates cancel in the mean, so that it is federated averaging with one step."""
    ours = toy_of(Scaffnew(communication_probability=1.0), mode=mode)
    plain = toy_of(FedAvg(aggregation="uniform"), TRAIN.model_copy(update={"max_local_steps": 1}), mode=mode)
    for _ in range(4):
        assert_close(ours.step(EVERYONE)["model"], plain.step(EVERYONE)["model"], 1e-12)


@pytest.mark.slow
def test_inv_new_4_it_reaches_the_optimum_of_all_and_stays_there() -> None:
    """Where federated averaging, with as many steps, stays apart from it."""
    train = TrainConfig(rounds=400, clients_per_round="all", batch_size=None, lr=0.3, weight_decay=0.1)
    distances = []
    for method, changes in ((Scaffnew(communication_probability=0.2), {}), (FedAvg(aggregation="uniform"), FIVE)):
        toy = Toy(method, random_clients((8, 12, 6)), softmax_regression(), train.model_copy(update=changes))
        toy.run(300)
        slopes = []
        for k in range(3):
            part = toy.dataset.load(k)["train"]
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
            loss = F.cross_entropy(toy.task.network.logits(leaves, part.x), part.y)
            parts = torch.autograd.grad(loss, list(leaves.values()))
            slopes.append([g + 0.1 * leaf.detach() for g, leaf in zip(parts, leaves.values(), strict=True)])
        distances.append(max(float(sum(of_all).abs().max()) / 3 for of_all in zip(*slopes, strict=True)))
    assert distances[0] < 1e-9 < 1e-3 < distances[1]


FIVE = {"local_epochs": 5}


def test_the_number_of_steps_is_geometric_and_the_same_for_all() -> None:
    toy, method = toy_of(Scaffnew()), Scaffnew(communication_probability=0.25)
    lengths = np.array([method.steps(toy.context, round) for round in range(4000)])
    assert lengths.min() == 1 and abs(lengths.mean() - 4) < 0.25
    assert abs(float((lengths == 1).mean()) - 0.25) < 0.03


@pytest.mark.parametrize("double_precision", [True, False])
@WEIGHTS
def test_vectorized_agrees_with_looped(weights: Any, double_precision: bool) -> None:
    method = Scaffnew(communication_probability=0.4, aggregation=weights)
    dtype = torch.float64 if double_precision else torch.float32
    looped, stacked = (
        Toy(method, random_clients(SIZES, dtype=dtype), two_layers(double=double_precision), TRAIN, mode=mode)
        for mode in ("looped", "vectorized")
    )
    for _ in range(4):
        assert_close(looped.step(EVERYONE), stacked.step(EVERYONE), 1e-10 if double_precision else 1e-5)
    assert_close(looped.states(), stacked.states(), 1e-9 if double_precision else 1e-4)


def test_a_learning_rate_of_0_changes_nothing() -> None:
    toy = toy_of(Scaffnew(), TRAIN.model_copy(update={"lr": 0.0}))
    before = copy(toy.server)
    for _ in range(2):
        assert_close(toy.step(EVERYONE), before, 1e-15)
    for k in EVERYONE:
        assert all(not torch.as_tensor(leaf).any() for leaf in toy.states()[k]["control"].values())


def test_buffers_are_averaged_and_have_no_control_variate() -> None:
    toy = Toy(Scaffnew(), random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    before = copy(toy.server["model"])
    toy.step(range(3))
    network = toy.task.network
    assert set(toy.states()[0]["control"]) == set(network.parameter_names) and network.buffer_names
    assert all(not torch.equal(toy.server["model"][name], before[name]) for name in network.buffer_names)


def test_what_travels() -> None:
    toy = toy_of(Scaffnew())
    size = num_bytes(toy.server["model"])
    for _ in range(2):
        toy.step(EVERYONE)
        assert toy.federation.traffic.by_client == dict.fromkeys(EVERYONE, (size, size))
    assert set(toy.states()[0]) == {"control", "trained", "factor"}
    assert_equal(set(toy.server), {"model"})


def test_what_is_undefined_is_refused() -> None:
    toy = toy_of(Scaffnew())
    Scaffnew().check(toy.task, toy.context)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"clients_per_round": 2}, r"Scaffnew needs all clients in every round"),
        ({"momentum": 0.9}, r"Scaffnew takes plain gradient steps, but train\.momentum is 0\.9: set it to 0"),
        ({"optimizer": "adam"}, r"Scaffnew needs train\.optimizer=sgd, not adam"),
    ]
    for changes, words in refused:
        with pytest.raises(ConfigError, match=words):
            Scaffnew().check(toy.task, toy_of(Scaffnew(), TRAIN.model_copy(update=changes)).context)
    for probability in (0.0, 1.1):
        with pytest.raises(ValueError, match="communication_probability"):
            Scaffnew(communication_probability=probability)


def test_remarks() -> None:
    assert not Scaffnew().remarks(toy_of(Scaffnew()).context)
    changes = {"local_epochs": 3, "max_grad_norm": 1.0}
    epochs, clipped = Scaffnew().remarks(toy_of(Scaffnew(), TRAIN.model_copy(update=changes)).context)
    assert "train.local_epochs has no effect: algorithm.communication_probability" in epochs
    assert "train.max_grad_norm" in clipped
