"""L2GD: invariants L2, fixture G17, the coin, what is communicated, refusals and learning."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.l2gd import L2GD
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, interpolate, map_leaves, num_bytes, subtract
from rayfl.tasks.base import Batch
from tests.support.planted import accuracies, related_clients
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
EVERYONE = range(len(SIZES))
TRAIN = TrainConfig(rounds=12, clients_per_round="all", batch_size=None, lr=0.8)
ALGORITHM = L2GD(penalty_weight=0.7, aggregation_probability=0.4)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any = ALGORITHM, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def models(toy: Toy) -> list[Tree]:
    """x_k of all clients."""
    return [toy.states()[client]["personal"] for client in range(toy.dataset.num_clients)]


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *leaves: torch.stack(leaves).mean(0), *trees)


def apart(toy: Toy) -> Toy:
    """The federation after a local step of everybody: clients differ."""
    toy.federation.begin_round(0)
    for _ in range(2):
        toy.federation.map(toy.algorithm.local_step, range(toy.dataset.num_clients), {})
    return toy


def aggregate(toy: Toy) -> Tree:
    """An aggregation after a local step, whatever the coin says; returns xbar."""
    everyone = range(toy.dataset.num_clients)
    center = toy.federation.mean(toy.algorithm.report, everyone, {})
    toy.federation.map(toy.algorithm.approach, everyone, {"mean": center})
    return center


@MODES
@pytest.mark.parametrize("weight", [0.0, 0.7, 2.0])
def test_inv_l2_1_aggregation_keeps_the_mean_and_contracts_the_deviations(weight: float, mode: str) -> None:
    algorithm = ALGORITHM.model_copy(update={"penalty_weight": weight})
    toy = apart(toy_of(algorithm, mode=mode))
    before = models(toy)
    center = aggregate(toy)
    assert_close(center, mean(before), 1e-12)
    pull = 0.8 * weight / (4 * 0.4)
    for old, new in zip(before, models(toy), strict=True):
        assert_close(subtract(new, center), map_leaves(lambda d: (1 - pull) * d, subtract(old, center)), 1e-12)
    assert_close(mean(models(toy)), center, 1e-12)
    # a further one needs no message: the clients have the mean
    toy.federation.begin_round(1)
    toy.federation.map(toy.algorithm.approach, range(4), {})
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (0, 0)
    for old, new in zip(before, models(toy), strict=True):
        assert_close(subtract(new, center), map_leaves(lambda d: (1 - pull) ** 2 * d, subtract(old, center)), 1e-12)
    assert_close(mean(models(toy)), center, 1e-12)


def test_inv_l2_2_g17_the_optimum_is_a_fixed_point_in_expectation() -> None:
    points, weight, p, eta = (0.0, 4.0), 0.5, 0.4, 0.3
    optima = [2 / 3, 10 / 3]
    train = TrainConfig(rounds=1, clients_per_round="all", batch_size=None, lr=eta)
    algorithm = L2GD(penalty_weight=weight, aggregation_probability=p)

    def at_the_optimum() -> Toy:
        toy = Toy(algorithm, quadratic_clients(points, [1, 1]), Quadratic(), train)
        for client, optimum in enumerate(optima):
            state = {"personal": {"theta": torch.tensor([optimum], dtype=torch.float64)}}
            toy.client_hosts[0].states.replace(client, state, 0)
        toy.federation.begin_round(0)
        return toy

    stepped, pulled = at_the_optimum(), at_the_optimum()
    stepped.federation.map(algorithm.local_step, range(2), {})
    assert abs(float(aggregate(pulled)["theta"]) - 2) < 1e-9
    for k, optimum in enumerate(optima):
        assert abs(optimum - (points[k] + weight * 2) / (1 + weight)) < 1e-12
        step, pull = (float(models(toy)[k]["theta"]) - optimum for toy in (stepped, pulled))
        assert abs(step) > 0.01
        assert abs((1 - p) * step + p * pull) < 1e-12


@pytest.mark.slow
def test_g17_models_gather_around_the_optimum() -> None:
    train = TrainConfig(rounds=700, clients_per_round="all", batch_size=None, lr=0.2)
    toy = Toy(L2GD(penalty_weight=0.5), quadratic_clients([0.0, 4.0], [1, 3]), Quadratic(), train)
    seen = []
    for round in range(train.rounds):
        toy.step()
        if round >= 100:
            seen.append([float(model["theta"]) for model in models(toy)])
    assert np.allclose(np.mean(seen, axis=0), [2 / 3, 10 / 3], atol=0.05)


@MODES
def test_inv_l2_3_without_pull_clients_descend_alone(mode: str) -> None:
    toy = toy_of(L2GD(penalty_weight=0.0), mode=mode)
    rate = 0.8 / (4 * 0.5)
    one_step = TRAIN.model_copy(update={"lr": rate, "local_epochs": 1})
    alone = toy_of(Local(schedule="all"), one_step, mode=mode)
    aggregations = 0
    for round in range(TRAIN.rounds):
        if toy.algorithm.aggregates(toy.context, round):  # type: ignore[attr-defined]
            before = toy.states()
            toy.step()
            aggregations += 1
            for client, state in before.items():
                assert_equal(toy.states()[client]["personal"], state["personal"])
        else:
            toy.step()
            alone.round = round
            alone.step()
            for client, model in enumerate(models(toy)):
                assert_close(alone.states()[client]["local"], model, 1e-12)
    assert 2 < aggregations < TRAIN.rounds - 2


def test_inv_l2_4_the_expected_step_follows_the_gradient_of_the_objective() -> None:
    stepped, pulled = apart(toy_of()), apart(toy_of())
    start = models(stepped)
    center = mean(start)
    stepped.federation.map(ALGORITHM.local_step, EVERYONE, {})
    aggregate(pulled)
    for k in EVERYONE:
        part = stepped.dataset.load(k)["train"]
        point = {name: leaf.clone().requires_grad_() for name, leaf in start[k].items()}
        parts = torch.autograd.grad(stepped.task.loss(point, Batch(part.x, part.y)), list(point.values()))
        gradient = add_scaled(dict(zip(point, parts, strict=True)), subtract(start[k], center), 0.7)
        local, aggregation = (subtract(models(toy)[k], start[k]) for toy in (stepped, pulled))
        expected = map_leaves(lambda a, b: 0.6 * a + 0.4 * b, local, aggregation)
        assert_close(expected, map_leaves(lambda g: -0.8 / 4 * g, gradient), 1e-12)


def test_a_local_step_is_one_mini_batch_without_momentum_or_decay() -> None:
    train = TRAIN.model_copy(update={"batch_size": 4, "local_epochs": 3, "lr_decay": 0.5})
    plain, ignored = (
        apart(toy_of(train=t)) for t in (train, train.model_copy(update={"momentum": 0.9, "weight_decay": 0.1}))
    )
    assert_equal(plain.states(), ignored.states())
    toy = toy_of(train=train)
    start = copy(toy.server["model"])
    toy.federation.begin_round(1)
    toy.federation.map(ALGORITHM.local_step, [2], {})
    order = toy.context.streams.generator("batches", 1, 2).permutation(SIZES[2])[:4].copy()
    part = toy.dataset.load(2)["train"]
    point = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    loss = toy.task.loss(point, Batch(part.x[order], part.y[order]))
    gradient = dict(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True))
    assert_close(toy.states()[2]["personal"], add_scaled(start, gradient, -0.4 / (4 * 0.6)), 1e-12)


def test_the_coin_is_everybodys_and_has_the_probability_asked_for() -> None:
    toy, other = toy_of(), toy_of(task=normalized_layers())
    coins = [ALGORITHM.aggregates(toy.context, round) for round in range(4000)]
    assert coins[:50] == [ALGORITHM.aggregates(other.context, round) for round in range(50)]
    assert abs(np.mean(coins) - 0.4) < 0.03
    pairs = np.mean([a and b for a, b in pairwise(coins)])
    assert abs(pairs - 0.16) < 0.03


def test_only_the_first_of_consecutive_aggregations_communicates() -> None:
    toy = toy_of(L2GD(penalty_weight=0.5, aggregation_probability=0.6))
    size, kinds = num_bytes(toy.server["model"]), set()
    before = False
    for round in range(TRAIN.rounds):
        server, own = copy(toy.server), toy.states()
        toy.step()
        now: bool = toy.algorithm.aggregates(toy.context, round)  # type: ignore[attr-defined]
        expected = len(SIZES) * size if now and not before else 0
        assert (toy.federation.traffic.down, toy.federation.traffic.up) == (expected, expected)
        if expected:
            trees = [own[client]["personal"] if own else server["model"] for client in EVERYONE]
            assert_close(toy.server["model"], mean(trees), 1e-12)
        else:
            assert_equal(toy.server, server)
        # the mean is of use only until the models move apart again
        assert all(("mean" in state) == now for state in toy.states().values())
        kinds.add((before, now))
        before = now
    assert len(kinds) == 4


def test_running_statistics_are_mixed_as_the_weights_are() -> None:
    toy = apart(toy_of(task=normalized_layers()))
    before = models(toy)
    center = aggregate(toy)
    pull = ALGORITHM.pull(toy.context, 0)
    for old, new in zip(before, models(toy), strict=True):
        assert not torch.equal(old["norm.running_mean"], center["norm.running_mean"])
        assert_close(new, interpolate(old, center, pull), 1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients_per_round": 3}, r"train\.clients_per_round=all"),
        ({"momentum": 0.5}, r"train\.momentum is 0\.5"),
        ({"weight_decay": 0.1}, r"train\.weight_decay is 0\.1"),
        ({"lr": 2.5}, r"1\.09 times.*lower train\.lr"),
    ],
)
def test_what_l2gd_cannot_run_with_is_refused(changes: dict[str, Any], message: str) -> None:
    toy = toy_of()
    for train in (TRAIN, TRAIN.model_copy(update={"clients_per_round": 4})):
        ALGORITHM.check(toy.task, toy_of(train=train).context)
    with pytest.raises(ConfigError, match=message):
        ALGORITHM.check(toy.task, toy_of(train=TRAIN.model_copy(update=changes)).context)


def test_vectorized_agrees_with_looped_on_any_number_of_hosts() -> None:
    looped, spread, stacked = toy_of(), toy_of(hosts=3), toy_of(mode="vectorized")
    for _ in range(6):
        for toy in (spread, stacked, looped):
            toy.step()
        assert_equal(spread.states(), looped.states())
        assert_close(stacked.states(), looped.states())
        assert_close(stacked.server, looped.server)


@pytest.mark.slow
def test_own_models_beat_their_mean_and_local_training() -> None:
    clients = related_clients(own=0.8)
    found = accuracies(L2GD(penalty_weight=0.1), clients, lr=4.0, rounds=100)
    assert found["personalized"] > found["global"] + 0.02
    assert found["personalized"] > accuracies(Local(), clients)["personalized"] + 0.02
