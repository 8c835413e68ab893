"""FedPHP's objective, its private model over rounds, and how it is run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.parts.transfer import distillation, half_squared_distance, maximum_mean_discrepancy
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, interpolate
from rayfl.tasks.base import Batch
from tests.support.fedphp_toys import SIZES, TRAIN, normed, toy
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

TRANSFERS = ("mmd", "kd", "l2", "prox")


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


@pytest.mark.two_cases
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
