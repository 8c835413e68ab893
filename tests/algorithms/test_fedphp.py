"""FedPHP: what is inherited, what is transferred, and what never reaches the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.fedphp_toys import TRAIN, normed, toy
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

TRANSFERS = ("mmd", "kd", "l2", "prox")


class ConstantMomentum(FedPHP):
    """A momentum that no schedule gives."""

    constant: float

    def momentum(self, selections: int, context: RoundContext) -> float:
        return self.constant


class Counting(Classification):
    """Counts the forward passes of teachers."""

    taught = 0

    def features_and_logits(
        self, model: Mapping[str, Tensor], batch: Batch, training: bool = True
    ) -> tuple[Tensor, Tensor]:
        self.taught += not training
        return super().features_and_logits(model, batch, training)


def context(round: int = 0, rounds: int = 1000, num_clients: int = 10, clients_per_round: int = 1) -> RoundContext:
    train = TrainConfig(rounds=rounds, clients_per_round=clients_per_round)
    return RoundContext(round, rounds, num_clients, train, RandomStreams(0))


def history(run: Toy) -> list[Tree]:
    return [copy(run.step()["model"]) for _ in range(run.train.rounds)]


@pytest.mark.parametrize("transfer", [*TRANSFERS, "none"])
def test_inv_php_1_zero_weight_is_federated_averaging(transfer: str) -> None:
    weight = 0.3 if transfer == "none" else 0.0
    for make in (two_layers, normed):
        reference = history(toy(FedAvg(aggregation="uniform"), task=make()))
        algorithm = FedPHP(transfer=transfer, transfer_weight=weight)
        assert_equal(dict(enumerate(history(toy(algorithm, task=make())))), dict(enumerate(reference)))


def test_inv_php_1_zero_weight_does_not_run_the_teacher() -> None:
    for algorithm, expected in (
        (FedPHP(transfer_weight=0.0), 0),
        (FedPHP(transfer="none", transfer_weight=0.5), 0),
        (FedPHP(), 3 * 2),  # clients times batches
    ):
        task = Counting(two_layers().network)
        Toy(algorithm, random_clients([16] * 3), task, TRAIN.model_copy(update={"local_epochs": 1})).step()
        assert task.taught == expected


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_inv_php_1_the_teacher_takes_no_dropout_draws_and_leaves_buffers_alone(transfer: str) -> None:
    """A weight so small that only side effects of the teacher could show."""
    reference = toy(FedAvg(aggregation="uniform"), task=normed()).run()
    server = toy(FedPHP(transfer=transfer, transfer_weight=1e-300), task=normed()).run()
    assert_close(server["model"], reference["model"], atol=1e-100)
    fresh = toy(FedPHP(), task=normed()).server["model"]
    assert (server["model"]["norm.running_mean"] - fresh["norm.running_mean"]).abs().max() > 1e-3


def test_aggregation_is_uniform_by_default_and_by_samples_on_request() -> None:
    def replies(aggregation: str | None) -> float:
        algorithm = FedPHP(transfer="none") if aggregation is None else FedPHP(transfer="none", aggregation=aggregation)
        train = TrainConfig(rounds=1, clients_per_round=2, local_epochs=1, batch_size=None, lr=1.0)
        return float(Toy(algorithm, quadratic_clients([0.0, 4.0], [1, 3]), Quadratic(), train).run()["model"]["theta"])

    assert replies(None) == pytest.approx(2.0, abs=1e-12)
    assert replies("samples") == pytest.approx(3.0, abs=1e-12)


def test_inv_php_2_without_momentum_the_hpm_is_the_trained_model() -> None:
    run = toy(ConstantMomentum(constant=0.0), task=normed())
    for cohort in ([1], [0], [1], [2]):
        trained = run.step(cohort)["model"]  # the mean of one client is its reply bit for bit
        assert_equal(run.states()[cohort[0]]["hpm"], trained)
        scores = run.federation.trained_scores[cohort[0]]["test"]
        assert (scores["hpm"].vector == scores["local"].vector).all()


def test_inv_php_2_with_full_momentum_the_hpm_never_moves() -> None:
    run = toy(ConstantMomentum(constant=1.0), task=normed())
    initial = copy(run.server["model"])
    run.run()
    assert run.states()
    for state in run.states().values():
        assert_equal(state["hpm"], initial)


@pytest.mark.parametrize("schedule", ["a", "b", "c"])
def test_inv_php_3_closed_form(schedule: str) -> None:
    run = toy(FedPHP(momentum_schedule=schedule, transfer_weight=0.2), TRAIN.model_copy(update={"rounds": 5}))
    models, momenta = [copy(run.server["model"])], []
    for round in range(5):
        cohort = [2] if round != 1 else [0]
        models.append(copy(run.step(cohort)["model"]))
        selections = len(momenta)
        if cohort == [2]:
            expected = max(3 * 5 // 4, 1)
            momenta.append({"a": min(0.9 * selections / expected, 1.0), "b": 0.9, "c": round / 5}[schedule])
    del models[2]  # trained by client 0
    coefficients = [math.prod(momenta)] + [(1 - mu) * math.prod(momenta[j + 1 :]) for j, mu in enumerate(momenta)]
    assert min(coefficients) >= 0
    assert sum(coefficients) == pytest.approx(1, abs=1e-12)
    assert coefficients[0] == (math.prod([0.9] * 4) if schedule == "b" else 0)
    expected_hpm = {
        name: sum(c * model[name] for c, model in zip(coefficients, models, strict=True)) for name in models[0]
    }
    assert_close(run.states()[2]["hpm"], expected_hpm, atol=1e-12)
    assert run.states()[2]["selections"] == 4


def test_g10_weights_of_past_models() -> None:
    def coefficients(algorithm: FedPHP) -> list[float]:
        momenta = [algorithm.momentum(z, context()) for z in range(3)]
        weights = [math.prod(momenta)]
        return weights + [(1 - mu) * math.prod(momenta[j + 1 :]) for j, mu in enumerate(momenta)]

    assert [FedPHP().momentum(z, context()) for z in range(3)] == pytest.approx([0, 0.009, 0.018], abs=1e-15)
    assert coefficients(FedPHP()) == pytest.approx([0, 0.000162, 0.017838, 0.982], abs=1e-12)
    assert coefficients(FedPHP(momentum_schedule="b")) == pytest.approx([0.729, 0.081, 0.09, 0.1], abs=1e-12)


def test_inv_php_4_schedules() -> None:
    growing, constant, timed = (FedPHP(momentum_schedule=s) for s in ("a", "b", "c"))
    values = [growing.momentum(z, context()) for z in range(150)]
    assert all(b > a for a, b in pairwise(values[:112]))
    assert values[100] == pytest.approx(0.9, abs=1e-12)
    assert values[112] == values[149] == 1.0
    assert FedPHP(momentum_clip=0.9).momentum(149, context()) == 0.9
    assert growing.momentum(7, context(round=3)) == growing.momentum(7, context(round=900))
    assert {constant.momentum(z, context(round=t)) for z in (0, 5, 500) for t in (0, 999)} == {0.9}
    assert {timed.momentum(z, context(round=250)) for z in (0, 5, 500)} == {0.25}
    assert timed.momentum(3, context(round=0)) == 0.0


def test_inv_php_4_counting_the_current_selection() -> None:
    after = FedPHP(count="after")
    assert after.momentum(0, context()) == pytest.approx(0.009, abs=1e-15)
    assert after.momentum(6, context()) == FedPHP().momentum(7, context())


@pytest.mark.parametrize(
    ("clients_per_round", "num_clients", "rounds", "expected"),
    [(29, 100, 100, 29), (1, 100, 10, 1), (1, 3, 10, 3), (20, 10, 7, 7)],
)
def test_expected_selections(clients_per_round: int, num_clients: int, rounds: int, expected: int) -> None:
    """Q T rounded down without float noise, at least one; a cohort is never larger than the population."""
    known = context(rounds=rounds, num_clients=num_clients, clients_per_round=clients_per_round)
    algorithm = FedPHP(macro_momentum=0.5)
    assert algorithm.momentum(1, known) == 0.5 / expected


def test_inv_php_5_the_hpm_reaches_the_server_only_through_the_transfer() -> None:
    def servers(weight: float) -> list[Tree]:
        return [
            toy(ConstantMomentum(constant=mu, transfer_weight=weight), TRAIN.model_copy(update={"rounds": 3})).run()
            for mu in (0.0, 1.0)
        ]

    forgetful, conservative = servers(0.0)
    assert_equal(forgetful, conservative)
    forgetful, conservative = servers(0.5)
    difference = forgetful["model"]["head.weight"] - conservative["model"]["head.weight"]
    assert difference.abs().max() > 1e-6


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_inv_php_5_the_hpm_is_frozen_while_it_teaches(transfer: str) -> None:
    seen: list[Tree] = []

    class Watched(FedPHP):
        def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
            assert not any(leaf.requires_grad for leaf in frozen["hpm"].values())
            seen.append(copy(frozen["hpm"]))
            return super().objective(model, batch, task, frozen, draw)

    run = toy(Watched(transfer=transfer, transfer_weight=0.5), task=normed())
    run.step([1])
    before = run.states()[1]["hpm"]
    seen.clear()
    run.step([1])
    assert len(seen) == 2 * 2
    for teacher in seen:
        assert_equal(teacher, before)
