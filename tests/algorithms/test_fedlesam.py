"""FedLESAM: an oracle in plain PyTorch, federated averaging as special case, steps by hand, statistics, privacy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedlesam import FedLESAM
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, copy, num_bytes, subtract
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import length
from tests.support.toy_networks import Quadratic, normalized_layers, recurrent_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
VERSIONS: list[dict[str, Any]] = [
    {"previous": "own"},
    {"previous": "own", "first_previous": "initial"},
    {"previous": "server"},
]
EACH = pytest.mark.parametrize("options", VERSIONS, ids=lambda options: "-".join(options.values()))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


@MODES
@EACH
@pytest.mark.parametrize("weights", ["uniform", "samples", "population"])
def test_inv_lesam_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any, options: Any, mode: str) -> None:
    rho, train = 0.3, TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(FedLESAM(radius=rho, aggregation=weights, **options), train, mode=mode)
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    history, received = [w], dict[int, Tree]()
    for round, cohort in enumerate(COHORTS):
        counted = cohort if weights == "samples" else range(len(SIZES))
        total = {n: torch.zeros_like(leaf) for n, leaf in w.items()}
        for i in cohort:
            first = history[0] if "first_previous" in options else w
            old = received.get(i, first) if options["previous"] == "own" else history[max(round - 1, 0)]
            way = {n: old[n] - w[n] for n in w}
            e = {n: rho * way[n] / length(way) if length(way) > 0 else way[n] for n in w}
            received[i] = w
            own, part = {n: leaf.clone() for n, leaf in w.items()}, toy.dataset.load(i)["train"]
            rule = torch.optim.SGD(own.values(), 0.1 * 0.8**round, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(SIZES[i], 4, 2 * -(-SIZES[i] // 4), streams.generator("batches", round, i))
            for index in plan.batches(CPU):
                there = {n: (own[n] + e[n]).requires_grad_() for n in own}
                loss = F.cross_entropy(network.logits(there, part.x[index]), part.y[index])
                for n, slope in zip(there, torch.autograd.grad(loss, list(there.values())), strict=True):
                    own[n].grad = slope
                rule.step()
            share = 1 / len(cohort) if weights == "uniform" else SIZES[i] / sum(SIZES[j] for j in counted)
            total = {n: total[n] + share * own[n] for n in own}
            if weights == "population":
                total = {n: total[n] - share * w[n] for n in own}
        w = {n: total[n] + w[n] for n in w} if weights == "population" else total
        history.append(w)
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
    if options["previous"] == "own":
        assert_close({i: state["previous"] for i, state in toy.states().items()}, received, 1e-12)
    else:
        assert not any(toy.states().values())
        assert_close(toy.server["previous"], history[-2], 1e-12)
    plain = toy_of(FedAvg(aggregation=weights), train)
    for cohort in COHORTS:
        plain.step(cohort)
    assert length(subtract(plain.server["model"], w)) > 1e-3


@MODES
@EACH
def test_inv_lesam_2_of_radius_0_it_is_fedavg(options: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"max_grad_norm": 1.0})
    sharp, plain = (
        toy_of(method, train, mode=mode, task=normalized_layers(0.4))
        for method in (FedLESAM(radius=0, **options), FedAvg())
    )
    for cohort in COHORTS[2:]:
        assert_equal(sharp.step(cohort), plain.step(cohort))
    assert_equal(sharp.states(), plain.states())


@MODES
@EACH
def test_inv_lesam_3_a_first_round_is_one_of_fedavg(options: Any, mode: str) -> None:
    """Nobody has a model of before, and the server's initial one is the received one: e is 0 in all versions."""
    sharp, plain = (toy_of(method, mode=mode) for method in (FedLESAM(radius=9.0, **options), FedAvg()))
    assert_close(sharp.step([0, 1, 2, 3])["model"], plain.step([0, 1, 2, 3])["model"], 1e-13)
    assert length(subtract(sharp.step([0, 1])["model"], plain.step([0, 1])["model"])) > 1e-2


def test_inv_lesam_4_where_all_take_part_in_all_rounds_own_and_servers_models_are_the_same() -> None:
    own, other, first = (toy_of(FedLESAM(radius=0.4, **options)) for options in VERSIONS)
    for _ in range(4):
        found = own.step(range(4))["model"]
        assert_equal(other.step(range(4))["model"], found)
        assert_equal(first.step(range(4))["model"], found)


@MODES
def test_inv_lesam_5_steps_on_a_quadratic(mode: str) -> None:
    """Of |theta - a|^2 / 2 the gradient is theta - a; after a round the way back is uphill, away from a."""
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = Toy(FedLESAM(radius=0.5), quadratic_clients([[4.0, 5.0]], [6]), Quadratic(2), train, mode=mode)
    assert toy.step()["model"]["theta"].tolist() == pytest.approx([1.3, 1.4], abs=1e-15)
    # w_old - w = (-0.3, -0.4), e = (-0.3, -0.4), and the gradient there is (1.0 - 4, 1.0 - 5)
    assert toy.step()["model"]["theta"].tolist() == pytest.approx([1.6, 1.8], abs=1e-15)


@MODES
@EACH
def test_inv_lesam_6_where_nothing_has_moved_nothing_moves(options: Any, mode: str) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=3, batch_size=None, lr=0.1)
    method = FedLESAM(radius=2.0, **options)
    toy = Toy(method, quadratic_clients([[1.0, 1.0]], [4]), Quadratic(2), train, mode=mode)
    for _ in range(3):
        assert toy.step()["model"]["theta"].tolist() == [1.0, 1.0]


@EACH
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(options: Any, double: bool) -> None:
    assert_modes_agree(FedLESAM(radius=0.3, **options), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@pytest.mark.parametrize("make", [two_layers, normalized_layers, recurrent_layers])
def test_the_objective_has_the_gradient_at_the_moved_point(make: Any) -> None:
    task, part = make(), random_clients([6]).load(0)["train"]
    batch, names = Batch(part.x, part.y), task.network.parameter_names
    model, other = (task.network.initialize(seed) for seed in (1, 2))

    def gradient(value: Any, at: Tree) -> Tree:
        return dict(zip(names, torch.autograd.grad(value, [at[name] for name in names]), strict=True))

    def leaves(shift: float) -> Tree:
        return {
            name: (leaf + shift * other[name] if name in names else leaf).clone().requires_grad_(name in names)
            for name, leaf in model.items()
        }

    here, there = leaves(0.0), leaves(1.0)
    found = gradient(FedLESAM().objective(here, batch, task, {"apart": {n: other[n] for n in names}}, None), here)
    assert_close(found, gradient(task.loss(there, batch), there), 1e-13)
    assert max(float((found[name] - gradient(task.loss(here, batch), here)[name]).abs().max()) for name in names) > 1e-3


@MODES
@pytest.mark.parametrize("previous", ["own", "server"])
def test_running_statistics_are_those_at_the_moved_point(previous: Any, mode: str) -> None:
    """One step on a whole mini-batch records the statistics of the inputs of normalization at w + e."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1, "momentum": 0.0})
    method = FedLESAM(radius=3.0, previous=previous)
    toy = toy_of(method, train, task=normalized_layers(), dataset=random_clients((9,)), mode=mode)
    network = toy.task.network
    start = copy(toy.server["model"])
    now = copy(toy.step([0])["model"])
    way = {name: start[name] - now[name] for name in network.parameter_names}
    there = {**copy(now), **{name: now[name] + 3.0 * leaf / length(way) for name, leaf in way.items()}}
    part = toy.dataset.load(0)["train"]
    toy.task.loss(there, Batch(part.x, part.y))  # records in place
    after = toy.step([0])["model"]
    assert network.buffer_names
    for name in network.buffer_names:
        assert_close(after[name], there[name], 1e-12)
    for kept in [toy.states()[0]] if previous == "own" else []:
        assert set(kept["previous"]) == set(network.parameter_names)


def test_messages_and_what_is_kept() -> None:
    for options, down in (({}, 1), ({"previous": "server"}, 2), ({"previous": "server", "radius": 0}, 1)):
        toy = toy_of(FedLESAM(**options))
        size = num_bytes(toy.server["model"])
        for cohort in ([0, 2], [2, 3]):
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down * size, size))
    assert set(toy.server) == {"model"} and not any(toy.states().values())
    common, own = toy.algorithm.served(toy_of(FedLESAM(previous="server")).server, toy.context)
    assert set(common) == {"model"} and not own


@EACH
def test_messages_are_changes_of_the_received_model_that_can_be_clipped(options: Any) -> None:
    """A long norm clips nothing; with a short one, the server moves no further, whatever e is."""
    method = FedLESAM(radius=0.3, aggregation="uniform", **options)
    plain, free, short = (toy_of(method, privacy=PrivacyConfig(clip_norm=norm)) for norm in (None, 1e6, 0.01))
    for cohort in ([0, 1], [1, 2], [0, 3]):
        assert_close(free.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)
        before = copy(short.server["model"])
        assert 0.001 < float(length(subtract(short.step(cohort)["model"], before))) < 0.01 + 1e-9


def test_a_run_continued_from_radius_0_begins_like_a_first_round() -> None:
    toy = toy_of(FedLESAM(radius=0, previous="server"))
    toy.step([0, 1])
    method = FedLESAM(radius=0.3, previous="server")
    assert_equal(method.sent(toy.server)["previous"], toy.server["model"])


def test_bounds() -> None:
    for field, value in (("radius", -0.1), ("previous", "last"), ("first_previous", "own")):
        with pytest.raises(ValueError, match=field):
            FedLESAM(**{field: value})
    (said,) = FedLESAM(previous="server", first_previous="initial").idle_settings()
    assert "algorithm.previous=own" in said
