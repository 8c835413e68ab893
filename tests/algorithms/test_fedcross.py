"""FedCross: invariants CROSS of rounds, partners, special cases, models that nobody got, and messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedcross import FedCross, partners_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import steps
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10, 9, 3)
FULL = ([0, 1, 2, 5], [1, 3, 4, 5], [0, 3, 4, 5], [0, 1, 2, 3])
RAGGED = ([0, 1, 2, 5], [1, 3], [0, 3, 4], [2], [1, 2, 4, 5])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    data = options.pop("dataset", random_clients(SIZES))
    return Toy(algorithm, data, task or two_layers(), train, **options)


def vector(model: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


def cosine(one: Tree, other: Tree) -> float:
    return float(vector(one) @ vector(other) / (vector(one).norm() * vector(other).norm()))


def uniform(models: list[Tree]) -> Tree:
    return {name: sum(model[name] for model in models) / len(models) for name in models[0]}


def chosen(trained: dict[int, Tree], number: int, choice: str, count: int, round: int) -> list[int]:
    others = [other for other in trained if other != number]
    if choice == "in_order":
        numbers = list(trained)
        own = numbers.index(number)
        # those after it in the circle, begun later by one in every round
        circle = [numbers[(own + 1 + step) % len(numbers)] for step in range(len(numbers) - 1)]
        turned = circle[round % len(circle) :] + circle[: round % len(circle)]
        return turned[:count]
    by_cosine = sorted(others, key=lambda other: cosine(trained[number], trained[other]))
    return (by_cosine[::-1] if choice == "highest" else by_cosine)[:count]


@pytest.mark.parametrize("cohorts", [FULL, RAGGED])
@pytest.mark.parametrize(
    ("choice", "partners", "warmup"),
    [
        ("lowest", 1, 0),
        ("highest", 1, 1),
        ("in_order", 1, 0),
        ("in_order", 2, 2),
        ("lowest", None, 0),
        ("lowest", 2, 0),
    ],
)
def test_inv_cross_1_rounds_are_those_of_plain_loops(
    choice: Any, partners: int | None, warmup: int, cohorts: Any
) -> None:
    toy = toy_of(FedCross(alpha=0.7, choice=choice, partners=partners, warmup_rounds=warmup))
    models = dict.fromkeys(range(4), toy.server["model"])
    for round, cohort in enumerate(cohorts):
        drawn = toy.context.streams.generator("dispatch", round).permutation(4)
        who = {int(number): client for client, number in zip(cohort, drawn, strict=False)}
        trained = {number: steps(toy, models[number], who[number], round) for number in sorted(who)}
        for number, own in trained.items():
            if round < warmup:
                models[number] = uniform(list(trained.values()))
            elif len(trained) == 1:
                models[number] = own
            else:
                count = min(partners or 9, len(trained) - 1)
                other = uniform([trained[j] for j in chosen(trained, number, choice, count, round)])
                models[number] = {name: 0.7 * leaf + 0.3 * other[name] for name, leaf in own.items()}
        toy.step(cohort)
        assert_close(toy.server["models"], {str(number): model for number, model in models.items()}, 1e-12)
        assert_close(toy.server["model"], uniform(list(models.values())), 1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("method", [FedCross(alpha=1 / 4, partners=None), FedCross(warmup_rounds=9)])
def test_inv_cross_2_all_as_partners_with_equal_weights_are_fedavg(method: FedCross, task: Any) -> None:
    cross, plain = toy_of(method, task=task()), toy_of(FedAvg(aggregation="uniform"), task=task())
    for cohort in FULL:
        assert_close(cross.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)
        for model in cross.server["models"].values():
            assert_close(model, cross.server["model"], 1e-12)


def test_inv_cross_3_two_models_that_share_half_are_fedavg() -> None:
    train = TRAIN.model_copy(update={"clients_per_round": 2})
    cross, plain = toy_of(FedCross(alpha=0.5), train), toy_of(FedAvg(aggregation="uniform"), train)
    for cohort in ([0, 1], [2, 5], [3, 4]):
        assert_close(cross.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


def test_inv_cross_4_one_model_that_goes_round_is_fedavg_of_one_client() -> None:
    train = TRAIN.model_copy(update={"clients_per_round": 1})
    cross, plain = toy_of(FedCross(), train), toy_of(FedAvg(), train)
    for client in (0, 3, 5, 0):
        assert_equal(cross.step([client])["model"], plain.step([client])["model"])


def test_inv_cross_5_with_alpha_1_models_are_trained_by_one_client_after_another() -> None:
    toy = toy_of(FedCross(alpha=1.0))
    models = {str(number): toy.server["model"] for number in range(4)}
    for round, cohort in enumerate(FULL):
        drawn = toy.context.streams.generator("dispatch", round).permutation(4).tolist()
        models = {
            str(number): steps(toy, models[str(number)], k, round) for k, number in zip(cohort, drawn, strict=True)
        }
        assert_close(toy.step(cohort)["models"], models, 1e-12)


@pytest.mark.parametrize("partners", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.99])
def test_inv_cross_6_in_order_a_mixing_keeps_the_mean(alpha: float, partners: int) -> None:
    method = FedCross(alpha=alpha, choice="in_order", partners=partners)
    generator = torch.Generator().manual_seed(0)
    trained = [{"w": torch.randn(3, 4, generator=generator, dtype=torch.float64)} for _ in range(5)]
    for round in range(6):
        mixed = method.mixed(trained, ["w"], round)
        assert_close(uniform(mixed), uniform(trained), 1e-14)


@pytest.mark.parametrize("m", [2, 3, 5])
def test_inv_cross_7_in_order_every_other_model_comes_in_turn(m: int) -> None:
    none = torch.zeros(m, m)
    for place in range(m):
        met = [partners_of(place, none, "in_order", 1, round)[0] for round in range(m - 1)]
        assert sorted(met) == [other for other in range(m) if other != place]
    for round in range(2 * m):
        assert sorted(partners_of(place, none, "in_order", 1, round)[0] for place in range(m)) == list(range(m))


def test_partners_are_the_least_and_the_most_similar_and_never_oneself() -> None:
    found = torch.tensor([[1.0, 0.2, -0.5, 0.2], [0.2, 1, 0, 0], [-0.5, 0, 1, 0], [0.2, 0, 0, 1]])
    assert partners_of(0, found, "lowest", 3, 0) == [2, 1, 3]
    assert partners_of(0, found, "highest", 3, 0) == [1, 3, 2]
    assert partners_of(1, found, "lowest", 1, 7) == [2]
    assert partners_of(2, -torch.ones(4, 4), "highest", 1, 0) == [0]


def test_models_that_nobody_got_stay_and_count_in_the_mean() -> None:
    toy = toy_of(FedCross())
    toy.step(FULL[0])
    before = copy(toy.server["models"])
    toy.step([1, 4])
    drawn = toy.context.streams.generator("dispatch", 1).permutation(4)[2:].tolist()
    for number in map(str, drawn):
        assert_equal(toy.server["models"][number], before[number])
    assert_close(toy.server["model"], uniform(list(toy.server["models"].values())), 1e-12)
    after = copy(toy.server)
    assert_equal(toy.step([]), after)


@pytest.mark.slow
def test_a_smaller_alpha_brings_models_together_faster() -> None:
    points = [-3.0, 1.0, 2.0, 8.0]
    train = TrainConfig(rounds=60, clients_per_round=4, local_epochs=1, batch_size=None, lr=0.1)
    spread = []
    for alpha in (0.5, 0.9, 0.99):
        toy = Toy(FedCross(alpha=alpha), quadratic_clients(points, [1] * 4), Quadratic(start=0.0), train)
        toy.run()
        assert math.isclose(float(toy.server["model"]["theta"]), 2.0, abs_tol=1.5)
        spread.append(float(torch.stack([model["theta"] for model in toy.server["models"].values()]).std()))
    assert spread[0] < spread[1] < spread[2]


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_stays_with_the_clients(policy: Any) -> None:
    toy = toy_of(FedCross(alpha=0.7), TRAIN.model_copy(update={"private_norm": policy}), normalized_layers())
    for cohort in RAGGED:
        toy.step(cohort)
    for model in (toy.server["model"], *toy.server["models"].values()):
        assert model["norm.running_mean"].numel() == 0
        assert (model["norm.weight"].numel() == 0) == (policy == "all")
    assert all(score["global"].loss > 0 for score in toy.scores().values())


def test_traffic_is_one_model_down_and_one_up() -> None:
    toy = toy_of(FedCross(), hosts=2)
    size = 8 * toy.task.network.num_parameters
    for cohort in RAGGED:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))


def test_poisson_cohorts_are_refused_unless_everybody_takes_part() -> None:
    some = toy_of(FedCross(), TRAIN.model_copy(update={"sampling": "poisson"}))
    with pytest.raises(ConfigError, match="poisson draws cohorts of any size"):
        some.algorithm.check(some.task, some.context)
    everybody = toy_of(FedCross(), TRAIN.model_copy(update={"sampling": "poisson", "clients_per_round": "all"}))
    everybody.algorithm.check(everybody.task, everybody.context)


@pytest.mark.parametrize("double", [True, False])
def test_looped_and_vectorized_agree(double: bool) -> None:
    assert_modes_agree(FedCross(alpha=0.7), (8, 12, 6, 10), TRAIN, double, 1e-10 if double else 1e-5)
