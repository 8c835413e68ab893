"""FedExP: invariants EXP, a round written out, the model that is evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedexp import FedExP, extrapolation
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import copy
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), TRAIN, **options)


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_exp_1_with_a_large_epsilon_it_is_fedavg(policy: Any) -> None:
    far, plain = toy_of(FedExP(epsilon=1e9, aggregation=policy)), toy_of(FedAvg(aggregation=policy))
    for _ in range(TRAIN.rounds):
        assert_equal(far.step()["model"], plain.step()["model"])


@pytest.mark.parametrize(("policy", "shares"), [("samples", (8, 6, 10)), ("uniform", (1, 1, 1))])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_exp_2_rounds_written_out(policy: Any, shares: tuple[int, ...], make: Any) -> None:
    toy = toy_of(FedExP(epsilon=1e-3, aggregation=policy), make())
    names, cohort, factors = toy.task.network.parameter_names, (0, 2, 3), []
    for _ in range(3):
        w = copy(toy.server["model"])
        trained = []
        for client in cohort:
            alone = toy_of(FedAvg(), make())
            alone.round, alone.server = toy.round, {"model": copy(w)}
            trained.append(alone.step([client])["model"])
        q = [share / sum(shares) for share in shares]
        mean = {name: sum(part * model[name] for part, model in zip(q, trained, strict=True)) for name in w}
        lengths = [sum((model[name] - w[name]).square().sum() for name in names) for model in trained]
        square = sum(part * length for part, length in zip(q, lengths, strict=True))
        of_mean = sum((mean[name] - w[name]).square().sum() for name in names)
        factors.append(max(1.0, float(square / (2 * (of_mean + 1e-3)))))
        found = toy.step(list(cohort))["model"]
        for name in w:
            goal = w[name] + factors[-1] * (mean[name] - w[name]) if name in names else mean[name]
            assert_close(found[name], goal, 1e-10, name)
    assert max(factors) > 1


def test_inv_exp_3_the_step_by_hand() -> None:
    assert extrapolation(1.0, 1.0, 1e-9) == 1.0  # clients that agree: half a step would do, a whole one is taken
    assert extrapolation(8.0, 1.0, 0.0) == 4.0
    assert extrapolation(8.0, 0.0, 2.0) == 2.0


def test_inv_exp_4_of_two_far_apart_points_the_step_is_long() -> None:
    """Clients whose local training ends at their own points, 3 and -1."""
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=400, batch_size=None, lr=0.2)
    toy = Toy(
        FedExP(epsilon=1e-12, aggregation="uniform"), quadratic_clients([3, -1], [2, 2]), Quadratic(start=0.5), train
    )
    moved = toy.step()["model"]["theta"]
    square, of_mean = (2.5**2 + 1.5**2) / 2, 0.5**2  # from 0.5 to 3 and -1, and to their mean 1
    assert_close(moved, torch.full_like(moved, 0.5 + 0.5 * square / (2 * of_mean)), 1e-9)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_exp_5_the_mean_of_the_last_two_is_evaluated(make: Any) -> None:
    averaged, last = toy_of(FedExP(), make()), toy_of(FedExP(average=False), make())
    before = copy(averaged.server["model"])
    assert_equal(averaged.algorithm.served(averaged.server, averaged.context)[0]["model"], before)
    for _ in range(3):
        before = copy(last.server["model"])
        after = last.step()["model"]
        assert_equal(averaged.step()["model"], after)
        common, _ = averaged.algorithm.served(averaged.server, averaged.context)
        for name, leaf in common["model"].items():
            assert_close(leaf, (before[name] + after[name]) / 2, 1e-12)
    assert averaged.scores()[0]["global"].loss != last.scores()[0]["global"].loss


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedExP(epsilon=1e-3), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
