"""Mime and MimeLite: an oracle in plain PyTorch, the optimizers that they mimic, their corrections, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.mime import Mime, MimeLite
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes, zeros_like
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
BOTH = pytest.mark.parametrize("method", [Mime, MimeLite])
BASES: dict[str, dict[str, Any]] = {
    "sgdm": {"momentum": 0.7},
    "adam": {"base": "adam", "momentum": 0.6, "second_decay": 0.9, "adaptivity": 0.2, "initial_accumulator": 0.01},
}
EACH_BASE = pytest.mark.parametrize("base", list(BASES))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def quad(algorithm: Any, points: Any, copies: Any, start: float = 1.0, **train: Any) -> Toy:
    section = TrainConfig(**{"rounds": 3, "clients_per_round": "all", "batch_size": None, "lr": 0.1, **train})
    return Toy(algorithm, quadratic_clients(points, copies), Quadratic(start=start), section)


@BOTH
@EACH_BASE
@pytest.mark.parametrize(("weights", "server_lr"), [("uniform", 1.0), ("samples", 0.6)])
def test_inv_mime_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    method: Any, base: str, weights: Any, server_lr: float
) -> None:
    """The listing of the algorithms, with weight decay as a part of every gradient."""
    options = {"initial_accumulator": 0.0, **BASES[base]}
    train = TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(method(aggregation=weights, server_lr=server_lr, **options), train)
    network, streams, beta = toy.task.network, toy.context.streams, options["momentum"]
    x = network.initialize(streams.integer("init.global"))
    m = zeros_like(x)
    v = {name: torch.full_like(leaf, options["initial_accumulator"]) for name, leaf in x.items()}

    def gradient(at: Tree, inputs: Any, labels: Any) -> Tree:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in at.items()}
        loss = F.cross_entropy(network.logits(leaves, inputs), labels)
        parts = torch.autograd.grad(loss, list(leaves.values()))
        return {name: g + 0.01 * at[name] for name, g in zip(at, parts, strict=True)}

    for round, cohort in enumerate(COHORTS):
        eta = 0.1 * 0.8**round
        mass = {i: 1 if weights == "uniform" else SIZES[i] for i in cohort}
        data = {i: toy.dataset.load(i)["train"] for i in cohort}
        full = {i: gradient(x, data[i].x, data[i].y) for i in cohort}
        c = {name: sum(mass[i] * full[i][name] for i in cohort) / sum(mass.values()) for name in x}
        ends = []
        for i in cohort:
            y = copy(x)
            plan = plan_batches(SIZES[i], 4, 2 * -(-SIZES[i] // 4), streams.generator("batches", round, i))
            for index in plan.batches(CPU):
                batch = data[i].x[index], data[i].y[index]
                g = gradient(y, *batch)
                if method is Mime:
                    there = gradient(x, *batch)
                    g = {name: g[name] - there[name] + c[name] for name in x}
                for name in x:
                    step = (1 - beta) * g[name] + beta * m[name]
                    y[name] = y[name] - eta * (step if base == "sgdm" else step / (v[name].sqrt() + 0.2))
            ends.append((mass[i], y))
        mean = {name: sum(share * y[name] for share, y in ends) / sum(mass.values()) for name in x}
        m = {name: (1 - beta) * c[name] + beta * m[name] for name in x}
        v = {name: 0.1 * c[name] ** 2 + 0.9 * v[name] for name in x}
        x = {name: x[name] + server_lr * (mean[name] - x[name]) for name in x}
        toy.step(cohort)
        assert_close(toy.server["model"], x, 1e-12)
        assert_close(toy.server["statistics"], {"first": m, **({"second": v} if base == "adam" else {})}, 1e-12)
    assert max(float(leaf.abs().max()) for leaf in m.values()) > 1e-2


@MODES
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_mime_2_mimelite_without_momentum_is_federated_averaging(mode: str, weights: Any) -> None:
    lite = toy_of(MimeLite(momentum=0.0, aggregation=weights), mode=mode)
    plain = toy_of(FedAvg(aggregation=weights), mode=mode)
    for cohort in COHORTS:
        assert_equal(lite.step(cohort)["model"], plain.step(cohort)["model"])


def test_inv_mime_3_with_one_step_a_round_mime_is_the_optimizer_on_all_data() -> None:
    """For any mini-batch: f_B's gradient at x is taken away from itself."""
    method = Mime(momentum=0.7, aggregation="samples")
    toy = toy_of(method, TRAIN.model_copy(update={"max_local_steps": 1, "weight_decay": 0.0}))
    parts = [toy.dataset.load(i)["train"] for i in range(len(SIZES))]
    inputs, labels = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.7)
    for round in range(4):
        toy.step(range(len(SIZES)))
        optimizer.zero_grad()
        (0.3 * F.cross_entropy(toy.task.network.logits(leaves, inputs), labels)).backward()
        optimizer.step()
        assert_close(toy.server["model"], {name: leaf.detach() for name, leaf in leaves.items()}, 1e-12), round


def test_inv_mime_4_with_one_mini_batch_of_everything_both_are_one_method() -> None:
    """Of one client, whose mini-batches are all its samples, c is what is taken away."""
    train = TRAIN.model_copy(update={"batch_size": None})
    for options in BASES.values():
        one, other = (toy_of(method(**options), train) for method in (Mime, MimeLite))
        for cohort in ([0], [1], [3]):
            assert_close(one.step(cohort)["model"], other.step(cohort)["model"], 1e-12)


@pytest.mark.slow
def test_inv_mime_5_fixed_points() -> None:
    """Where curvatures are equal Mime stays at the optimum of all; MimeLite moves by its clients' drift."""
    steps = {"local_epochs": 3, "batch_size": 1}
    for method, stays in ((Mime, True), (MimeLite, False)):
        toy = quad(method(), (0.0, 3.0), (1, 3), start=1.5, **steps)
        toy.step([0, 1])
        assert (abs(float(toy.server["model"]["theta"]) - 1.5) < 1e-12) == stays
    toy = quad(Mime(momentum=0.5), (0.0, 3.0, 6.0), (1, 4, 2), start=-4.0, **steps)
    for _ in range(60):
        toy.step([0, 1, 2])
    assert abs(float(toy.server["model"]["theta"]) - 3.0) < 1e-6
    assert abs(float(toy.server["statistics"]["first"]["theta"])) < 1e-6


@pytest.mark.parametrize("double", [True, False])
@BOTH
@EACH_BASE
def test_vectorized_agrees_with_looped(method: Any, base: str, double: bool) -> None:
    assert_modes_agree(method(**BASES[base]), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@MODES
@BOTH
@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_a_round_without_steps_keeps_the_model_and_renews_the_statistics(
    method: Any, mode: str, idle: dict[str, Any]
) -> None:
    toy = toy_of(method(), TRAIN.model_copy(update=idle), mode=mode)
    before = copy(toy.server)
    toy.step([0, 1])
    assert_equal(toy.server["model"], before["model"])
    first = [float((toy.server["statistics"]["first"][name]).abs().max()) for name in before["model"]]
    assert min(first) > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@MODES
@BOTH
@EACH_BASE
def test_running_statistics_are_those_at_the_trained_model(method: Any, base: str, mode: str, dropout: float) -> None:
    """One pass at y_i records, and where the step is 0 that is what federated averaging records."""
    train = TRAIN.model_copy(update={"lr": 0.0, "weight_decay": 0.0})
    ours, plain = (
        Toy(one, random_clients((8, 12, 6)), normalized_layers(dropout), train, mode=mode)
        for one in (method(**BASES[base]), FedAvg(aggregation="uniform"))
    )
    ours.step([0, 1])
    plain.step([0, 1])
    network = ours.task.network
    assert set(ours.server["statistics"]["first"]) == set(network.parameter_names) and network.buffer_names
    for name in network.buffer_names:
        assert_close(ours.server["model"][name].double(), plain.server["model"][name].double(), 1e-12)


@MODES
def test_both_gradients_of_a_step_have_the_same_masks(mode: str) -> None:
    """In a first step they cancel, whatever is dropped."""
    train = TRAIN.model_copy(update={"max_local_steps": 1, "weight_decay": 0.0})
    toy = Toy(Mime(), random_clients((8, 12, 6)), normalized_layers(0.5), train, mode=mode)
    before = copy(toy.server["model"])
    after = toy.step([0, 1])
    for name in toy.task.network.parameter_names:  # (1 - beta) c is the new m
        assert_close(after["model"][name], before[name] - 0.1 * after["statistics"]["first"][name], 1e-12)


def test_what_travels() -> None:
    for method, down in ((Mime, 3), (MimeLite, 2)):
        for base, more in (("sgdm", 0), ("adam", 1)):
            toy = toy_of(method(base=base))
            size = num_bytes(toy.server["model"])
            for cohort in COHORTS[1:3]:
                toy.step(cohort)
                assert toy.federation.traffic.by_client == dict.fromkeys(cohort, ((down + more) * size, 2 * size))
            assert not any(toy.states().values())


@BOTH
def test_what_is_undefined_is_refused(method: Any) -> None:
    toy, name = toy_of(method()), method.__name__
    refused: list[tuple[dict[str, Any], str]] = [
        ({"momentum": 0.9}, rf"the momentum of {name} is algorithm\.momentum.*set train\.momentum=0"),
        ({"momentum": 0.9, "nesterov": True}, rf"{name} does without train\.nesterov"),
        (
            {"optimizer": "adam"},
            rf"{name} needs train\.optimizer=sgd, not adam: its steps are those of algorithm\.base",
        ),
    ]
    for changes, words in refused:
        with pytest.raises(ConfigError, match=words):
            method().check(toy.task, toy_of(method(), TRAIN.model_copy(update=changes)).context)
    clipped = toy_of(method(), TRAIN.model_copy(update={"max_grad_norm": 1.0})).context
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm=null, or algorithm\.base=sgdm"):
        method(base="adam").check(toy.task, clipped)
    method().check(toy.task, clipped)
    (said,) = method().remarks(clipped)
    assert "train.max_grad_norm" in said and not method().remarks(toy.context)
