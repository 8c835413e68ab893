"""FedPHP: what is inherited, what is transferred, and what never reaches the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.parts.transfer import distillation, half_squared_distance, maximum_mean_discrepancy
from rayfl.engine.classification import Classification
from rayfl.engine.round_context import RoundContext
from rayfl.engine.settings import TrainConfig
from rayfl.engine.tasks import Batch
from rayfl.params import Tree, copy, interpolate
from rayfl.randomness import RandomStreams
from tests.support.toys import (
    Quadratic,
    Toy,
    assert_close,
    assert_equal,
    normalized_layers,
    quadratic_clients,
    random_clients,
    two_layers,
)

SIZES = (20, 13, 10, 19)  # no batch of one sample, which has no batch statistics
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-3
)
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


def toy(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def normed() -> Classification:
    return normalized_layers(0.3)


def context(round: int = 0, rounds: int = 1000, num_clients: int = 10, clients_per_round: int = 1) -> RoundContext:
    train = TrainConfig(rounds=rounds, clients_per_round=clients_per_round)
    return RoundContext(round, rounds, num_clients, train, RandomStreams(0))


def history(run: Toy) -> list[Tree]:
    return [copy(run.step()["model"]) for _ in range(run.train.rounds)]


def objective_at(algorithm: FedPHP, task: Any, model: Tree, hpm: Tree, batch: Batch) -> tuple[Tensor, Tree]:
    """Value and gradient with respect to the parameters of ``model``."""
    moving = {name: leaf.clone().requires_grad_(name in task.network.parameter_names) for name, leaf in model.items()}
    value = algorithm.objective(moving, batch, task, {"hpm": hpm}, None)
    names = list(task.network.parameter_names)
    gradients = torch.autograd.grad(value, [moving[name] for name in names])
    return value.detach(), dict(zip(names, gradients, strict=True))


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


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


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_objective_weighs_cross_entropy_and_transfer(transfer: str) -> None:
    task, batch, weight = two_layers(), some_batch(), 0.3
    model, hpm = task.network.initialize(1), task.network.initialize(2)
    value, _ = objective_at(FedPHP(transfer=transfer, transfer_weight=weight), task, model, hpm, batch)
    features, logits = task.features_and_logits(model, batch)
    old_features, old_logits = task.features_and_logits(hpm, batch, training=False)
    transfers = {
        "mmd": maximum_mean_discrepancy(features, old_features, batch),
        "kd": distillation(logits, old_logits, batch, 4.0),
        "l2": half_squared_distance(features, old_features, batch),
        "prox": torch.stack([((model[name] - hpm[name]) ** 2).sum() for name in model]).sum(),
    }
    expected = (1 - weight) * task.loss(model, batch) + weight * transfers[transfer]
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_distillation_follows_temperature_and_form() -> None:
    task, batch = two_layers(), some_batch()
    model, hpm = task.network.initialize(1), task.network.initialize(2)
    algorithm = FedPHP(transfer="kd", transfer_weight=1.0, temperature=2.0, kd_form="code")
    value, _ = objective_at(algorithm, task, model, hpm, batch)
    target = (task.logits(hpm, batch, training=False) / 2).softmax(-1)
    expected = -(target * task.logits(model, batch).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_the_teacher_is_in_evaluation_mode() -> None:
    """With itself as the teacher, a net with batch statistics still differs from its running statistics."""
    task, batch = normed(), some_batch()
    model = task.network.initialize(1)
    algorithm = FedPHP(transfer="l2", transfer_weight=1.0)
    torch.manual_seed(0)
    value, _ = objective_at(algorithm, task, model, model, batch)
    torch.manual_seed(0)
    student = task.features_and_logits(copy(model), batch)[0]
    teacher = task.features_and_logits(copy(model), batch, training=False)[0]
    expected = half_squared_distance(student, teacher, batch)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    assert expected > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_inv_php_6_an_hpm_that_agrees_distils_nothing(temperature: float) -> None:
    """The loss itself is tested where it is defined: gradient, high temperature."""
    task, batch = two_layers(), some_batch()
    model = task.network.initialize(1)
    algorithm = FedPHP(transfer="kd", transfer_weight=1.0, temperature=temperature)
    value, gradient = objective_at(algorithm, task, model, model, batch)
    assert value == 0
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in gradient.values())
    value, gradient = objective_at(algorithm, task, model, task.network.initialize(2), batch)
    assert value > 1e-3 and gradient["head.weight"].abs().max() > 1e-3


def test_inv_php_7_discrepancy_of_the_features_that_enter_the_classifier() -> None:
    """The loss itself is tested where it is defined: multisets, motions, scales, padding."""
    task, batch = two_layers(), some_batch()
    model, hpm = task.network.initialize(1), task.network.initialize(2)
    algorithm = FedPHP(transfer="mmd", transfer_weight=1.0)
    value, gradient = objective_at(algorithm, task, model, hpm, batch)
    assert 0 < value <= 10
    assert value == pytest.approx(float(objective_at(algorithm, task, hpm, model, batch)[0]), abs=1e-12)
    # the head is behind the features
    assert not gradient["head.weight"].any() and gradient["inner.weight"].any()
    value, gradient = objective_at(algorithm, task, model, model, batch)
    assert abs(value) < 1e-12 and max(leaf.abs().max() for leaf in gradient.values()) < 1e-12

    value, gradient = objective_at(algorithm, task, model, hpm, some_batch(1))
    assert value == 0
    assert not any(leaf.any() for leaf in gradient.values())
    of_the_paper = FedPHP(transfer="mmd", transfer_weight=1.0, one_sample="paper")
    constant = 2 * sum(1 - math.exp(-(2.0 ** (2 - i))) for i in range(5))
    value, gradient = objective_at(of_the_paper, task, model, hpm, some_batch(1))
    assert value == pytest.approx(constant, abs=1e-6)
    assert gradient["inner.weight"].any()


def test_inv_php_8_prox_is_zero_at_the_hpm_and_leaves_buffers_out() -> None:
    task, batch = normed(), some_batch()
    model = task.network.initialize(1)
    other = {name: leaf + 1 if name in task.network.buffer_names else leaf for name, leaf in model.items()}
    algorithm = FedPHP(transfer="prox", transfer_weight=1.0)
    value, gradient = objective_at(algorithm, task, model, other, batch)
    assert value == 0
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in gradient.values())
    far = task.network.initialize(2)
    _, gradient = objective_at(algorithm, task, model, far, batch)
    assert_close(gradient, {name: 2 * (model[name] - far[name]) for name in gradient}, atol=1e-12)


def test_inv_php_8_fixed_point_on_quad() -> None:
    weight, point, start = 0.3, 3.0, 1.0
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=200, batch_size=None, lr=0.3)
    algorithm = FedPHP(transfer="prox", transfer_weight=weight)
    server = Toy(algorithm, quadratic_clients([point], [2]), Quadratic(start=start), train).run()
    expected = ((1 - weight) * point + 2 * weight * start) / ((1 - weight) + 2 * weight)
    assert float(server["model"]["theta"]) == pytest.approx(expected, abs=1e-12)


def test_inv_php_9_distillation_alone_ignores_the_labels() -> None:
    data, relabelled = random_clients(SIZES), random_clients(SIZES)
    relabelled._clients = [(x, y.roll(1)) for x, y in relabelled._clients]
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(data._clients, relabelled._clients, strict=True))

    def run(clients: Any, weight: float) -> Tree:
        return Toy(
            FedPHP(transfer="kd", transfer_weight=weight, momentum_schedule="b"), clients, two_layers(), TRAIN
        ).run()

    assert_equal(run(data, 1.0), run(relabelled, 1.0))
    labelled, other = run(data, 0.5), run(relabelled, 0.5)
    assert not torch.equal(labelled["model"]["head.weight"], other["model"]["head.weight"])


def test_inv_php_10_an_hpm_changes_only_when_its_client_is_selected() -> None:
    """So the accuracy that a client has just before its next selection is the one it had after its last."""
    run = toy(FedPHP(momentum_schedule="b"))
    run.step([0, 1])
    last = {client: run.federation.trained_scores[client]["test"]["hpm"] for client in (0, 1)}
    for cohort in ([2, 3], [1, 2]):
        before = run.states()
        run.step(cohort)
        after = run.states()
        for client in before:
            if client not in cohort:
                assert_equal(after[client], before[client])
            else:
                assert not torch.equal(after[client]["hpm"]["head.weight"], before[client]["hpm"]["head.weight"])
        assert (run.scores()[0]["hpm"].vector == last[0].vector).all()


def test_never_selected_clients_are_scored_with_the_initial_model() -> None:
    run = toy(FedPHP())
    initial = run.scores()
    run.step([0, 1])
    scores = run.scores()
    assert set(run.states()) == {0, 1}
    for client in (2, 3):
        assert (scores[client]["hpm"].vector == initial[client]["global"].vector).all()
        assert scores[client]["global"].loss != initial[client]["global"].loss
    assert FedPHP.personalized in scores[0]
    assert set(scores[0]) == {"global", "hpm"}


def test_three_models_are_published_after_training() -> None:
    run = toy(FedPHP(momentum_schedule="b"))
    run.step([1])
    published = run.federation.trained_scores[1]["test"]
    assert set(published) == {"hpm", "local", "ensemble"}
    examples, task = run.dataset.load(1)["test"], run.task
    hpm, local = run.states()[1]["hpm"], run.server["model"]
    members = [task.network.logits(model, examples.x).softmax(-1) for model in (hpm, local)]
    for row, probability in (("hpm", members[0]), ("local", members[1]), ("ensemble", sum(members) / 2)):
        expected = -probability.gather(1, examples.y[:, None]).log().mean()
        assert published[row].loss == pytest.approx(float(expected), abs=1e-10)
    assert published["hpm"].loss != published["local"].loss


def test_skipping_the_first_transfer() -> None:
    """The first selection is plain averaging; the second one teaches again."""
    average, skipping, faithful = (
        toy(algorithm, task=two_layers())
        for algorithm in (
            FedAvg(aggregation="uniform"),
            FedPHP(transfer_weight=0.5, skip_first_transfer=True),
            FedPHP(transfer_weight=0.5),
        )
    )
    everyone = [0, 1, 2, 3]
    servers = [run.step(everyone) for run in (average, skipping, faithful)]
    assert_equal(servers[1], servers[0])
    assert not torch.equal(servers[2]["model"]["head.weight"], servers[0]["model"]["head.weight"])
    assert not torch.equal(
        skipping.step(everyone)["model"]["head.weight"], average.step(everyone)["model"]["head.weight"]
    )


def test_the_hpm_inherits_buffers_too() -> None:
    run = toy(FedPHP(momentum_schedule="b", transfer="none"), task=normed())
    initial = copy(run.server["model"])
    trained = run.step([1])["model"]
    assert_close(run.states()[1]["hpm"], interpolate(trained, initial, 0.9), atol=1e-15)
    drift = run.states()[1]["hpm"]["norm.running_mean"] - initial["norm.running_mean"]
    assert drift.abs().max() > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"transfer": "mmd"},
        {"transfer": "kd"},
        {"transfer": "kd", "kd_form": "code"},
        {"transfer": "l2"},
        {"transfer": "prox"},
        {"transfer": "none"},
        {"transfer": "mmd", "skip_first_transfer": True},
    ],
)
def test_vectorized_matches_looped_on_ragged_clients(settings: dict[str, Any]) -> None:
    algorithm = FedPHP(transfer_weight=0.4, momentum_schedule="b", **settings)
    looped, stacked = (toy(algorithm, mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run(), atol=1e-9)
    assert_close(looped.states(), stacked.states(), atol=1e-9)


def test_hosts_do_not_matter() -> None:
    one, three = (toy(FedPHP(transfer_weight=0.4), hosts=hosts) for hosts in (1, 3))
    assert_equal(one.run(), three.run())
    assert_equal(one.states(), three.states())


def test_the_hpm_never_travels() -> None:
    average, inheriting = toy(FedAvg()), toy(FedPHP())
    average.step([0, 2])
    inheriting.step([0, 2])
    assert inheriting.federation.traffic == average.federation.traffic
    assert set(inheriting.server) == {"model"}
    assert set(inheriting.states()[0]) == {"hpm", "selections"}


def test_no_local_epochs_change_nothing() -> None:
    run = toy(FedPHP(transfer_weight=0.4), TRAIN.model_copy(update={"local_epochs": 0}))
    initial = copy(run.server)
    assert_equal(run.run(), initial)


def test_evaluation_has_no_side_effects() -> None:
    run = toy(FedPHP())
    run.run(2)
    before, server = run.states(), copy(run.server)
    first, second = run.scores(), run.scores()
    assert_equal(run.states(), before)
    assert_equal(run.server, server)
    assert all((first[c][row].vector == second[c][row].vector).all() for c in first for row in first[c])


def test_defaults_are_the_papers() -> None:
    algorithm = FedPHP()
    assert (algorithm.name, algorithm.transfer, algorithm.transfer_weight) == ("fedphp", "mmd", 0.01)
    assert (algorithm.momentum_schedule, algorithm.macro_momentum, algorithm.momentum_clip) == ("a", 0.9, 1.0)
    assert (algorithm.count, algorithm.temperature, algorithm.kd_form) == ("before", 4.0, "paper")
    assert (algorithm.skip_first_transfer, algorithm.aggregation) == (False, "uniform")
