"""FedSpeed: an oracle in plain PyTorch, FedDyn and FedDC as special cases, fixed points, passes uphill, buffers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from algorithms.feddc import FedDC
from algorithms.feddyn import FedDyn
from algorithms.fedspeed import FedSpeed
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, map_leaves, num_bytes, zeros_like
from rayfl.tasks.base import Batch, begin_step
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import slopes
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
EVERYONE = ([0, 1, 2, 3],) * 4
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
OPTIONS: list[dict[str, Any]] = [
    {"alpha": alpha, "normalized": normalized, "correction_mean": mean}
    for alpha, normalized, mean in product((0.6, 1.0), (True, False), ("cohort", "all"))
]
PLAIN: list[dict[str, Any]] = [{"rho": 0.0}, {"alpha": 0.0}]
VERSIONS = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def quad(algorithm: Any, points: Any, start: float = 1.0, **train: Any) -> Toy:
    section = TrainConfig(**{"rounds": 3, "clients_per_round": "all", "batch_size": None, "lr": 0.1, **train})
    return Toy(algorithm, quadratic_clients(points, (1,) * len(points)), Quadratic(start=start), section)


@VERSIONS
def test_inv_speed_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: Any) -> None:
    """Algorithm 1 as it stands, with ghat_i itself, two gradients a step, and lambda where the paper has it."""
    lam, rho, alpha, train = 3.0, 0.4, options["alpha"], TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(FedSpeed(proximal_scale=lam, rho=rho, **options), train)
    network, streams = toy.task.network, toy.context.streams
    x = network.initialize(streams.integer("init.global"))
    ghat = [zeros_like(x) for _ in SIZES]
    for round, cohort in enumerate(COHORTS):
        eta, ends, sent = 0.1 * 0.8**round, [], []
        for i in cohort:
            part, own = toy.dataset.load(i)["train"], copy(x)
            plan = plan_batches(SIZES[i], 4, 2 * -(-SIZES[i] // 4), streams.generator("batches", round, i))
            for index in plan.batches(CPU):
                one = slopes(network, own, part.x[index], part.y[index])
                far = (
                    rho / torch.cat([leaf.flatten() for leaf in one.values()]).norm() if options["normalized"] else rho
                )
                two = slopes(network, {n: own[n] + far * one[n] for n in own}, part.x[index], part.y[index])
                mixed = {n: (1 - alpha) * one[n] + alpha * two[n] + 0.01 * own[n] for n in own}
                own = {n: own[n] - eta * (mixed[n] - ghat[i][n] + (own[n] - x[n]) / lam) for n in own}
            ghat[i] = {n: ghat[i][n] - (own[n] - x[n]) / lam for n in own}
            ends.append(own)
            sent.append({n: own[n] - lam * ghat[i][n] for n in own})
        if options["correction_mean"] == "cohort":
            x = map_leaves(lambda *all: sum(all) / len(all), *sent)
        else:  # the official code: the mean of the models, and the mean of all clients' corrections
            everyone = map_leaves(lambda *all: -lam * sum(all) / len(all), *ghat)
            x = map_leaves(lambda *all: sum(all[1:]) / len(all[1:]) + all[0], everyone, *ends)
        toy.step(cohort)
        assert_close(toy.server["model"], x, 1e-12)
        for i, state in toy.states().items():
            assert_close(map_leaves(lambda leaf: -leaf / lam, state["correction"]), ghat[i], 1e-12)
    assert max(float(leaf.abs().max()) for leaf in ghat[0].values()) > 1e-2


@MODES
@pytest.mark.parametrize("plain", PLAIN, ids=["rho", "alpha"])
def test_inv_speed_2_without_the_look_uphill_it_is_feddyn_and_feddc(plain: Any, mode: str) -> None:
    """With all corrections FedDyn, with the cohort's FedDC of that mean without its own gradient correction."""
    momentum = TRAIN.model_copy(update={"momentum": 0.5})
    pairs: list[tuple[Any, Any]] = [
        (FedSpeed(proximal_scale=4.0, correction_mean="all", **plain), FedDyn(alpha=0.25)),
        (
            FedSpeed(proximal_scale=4.0, **plain),
            FedDC(alpha=0.25, correction="none", drift_mean="cohort", aggregation="uniform"),
        ),
    ]
    for methods in pairs:
        one, other = (toy_of(method, momentum, mode=mode) for method in methods)
        for cohort in COHORTS:
            assert_close(one.step(cohort)["model"], other.step(cohort)["model"], 1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_inv_speed_3_where_everyone_takes_part_both_means_of_corrections_agree(alpha: float) -> None:
    one, other = (toy_of(FedSpeed(rho=0.3, alpha=alpha, correction_mean=mean)) for mean in ("cohort", "all"))
    for cohort in EVERYONE:
        assert_close(one.step(cohort)["model"], other.step(cohort)["model"], 1e-12)
    assert_close(one.states(), other.states(), 1e-12)


def test_inv_speed_4_a_vanishing_step_uphill_changes_nothing() -> None:
    for normalized in (True, False):
        near, none = (toy_of(FedSpeed(rho=rho, alpha=0.7, normalized=normalized)) for rho in (1e-14, 0.0))
        for cohort in COHORTS:
            assert_close(near.step(cohort), none.step(cohort), 1e-10)


@pytest.mark.parametrize("mean", ["cohort", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_inv_speed_5_fixed_point(mean: Any) -> None:
    """At the minimum of the mean loss each ghat_i that is its client's gradient keeps it there; others lead there."""
    points, lam, best = (0.0, 3.0, 6.0), 2.0, 3.0
    toy = quad(FedSpeed(proximal_scale=lam, rho=0.0, correction_mean=mean), points, start=best)
    for i, point in enumerate(points):
        slope = best - point  # of (theta - point)^2 / 2
        state = {"correction": {"theta": torch.full_like(toy.server["model"]["theta"], -lam * slope)}}
        toy.client_hosts[0].states.replace(i, state, 0)
    before = copy(toy.states())
    toy.step([0, 1, 2])
    assert_close(toy.server["model"]["theta"], torch.full_like(toy.server["model"]["theta"], best), 1e-12)
    assert_close(toy.states(), before, 1e-12)
    toy = quad(FedSpeed(proximal_scale=lam, rho=0.0, correction_mean=mean), points, start=-4.0, local_epochs=20)
    for _ in range(100):
        toy.step([0, 1, 2])
    assert abs(float(toy.server["model"]["theta"]) - best) < 1e-9


@VERSIONS
@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_vectorized_agrees_with_looped(options: Any, double: bool) -> None:
    assert_modes_agree(FedSpeed(rho=0.3, **options), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@MODES
@pytest.mark.parametrize("mean", ["cohort", "all"])
def test_without_training_clients_keep_their_corrections(mode: str, mean: Any) -> None:
    """The server adds what they keep: its own mean of them, which is 0, or the cohort's."""
    toy = toy_of(FedSpeed(correction_mean=mean), TRAIN.model_copy(update={"local_epochs": 0}), mode=mode)
    start = copy(toy.server["model"])
    ones = map_leaves(torch.ones_like, start)
    toy.client_hosts[0].states.replace(1, {"correction": ones}, 0)
    toy.step([0, 1])
    assert_equal(toy.states()[1]["correction"], ones)
    added = 0.5 if mean == "cohort" else 0.0
    assert_close(toy.server["model"], map_leaves(lambda leaf: leaf + added, start), 1e-12)


@MODES
def test_running_statistics_are_those_at_x_and_are_averaged(mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1})
    uphill, plain = (
        toy_of(FedSpeed(rho=rho, alpha=0.5), train, task=normalized_layers(), dataset=random_clients((9, 5)), mode=mode)
        for rho in (3.0, 0.0)
    )
    left, right = (toy.step([0, 1])["model"] for toy in (uphill, plain))
    network = uphill.task.network
    assert network.buffer_names
    for name in network.buffer_names:
        assert_close(left[name], right[name], 1e-13)
    assert (left["inner.weight"] - right["inner.weight"]).abs().max() > 1e-3
    assert set(uphill.states()[0]["correction"]) == set(network.parameter_names)


def test_the_gradient_mixes_two_with_the_same_dropout() -> None:
    task, part = normalized_layers(0.5), random_clients((12,)).load(0)["train"]
    batch, names = Batch(part.x, part.y), task.network.parameter_names
    model = task.network.initialize(0)

    def gradient(method: FedSpeed) -> Tree:
        begin_step(task, torch.tensor(7))
        moved = {n: leaf.clone().requires_grad_(n in names) for n, leaf in model.items()}
        anchor = {n: model[n] for n in names}  # where the proximal term has no gradient
        value = method.objective(moved, batch, task, {"anchor": anchor}, None)
        return dict(zip(names, torch.autograd.grad(value, [moved[name] for name in names]), strict=True))

    one, two, mixed = (gradient(FedSpeed(rho=0.5, alpha=alpha)) for alpha in (0.0, 1.0, 0.3))
    for name in names:
        assert_close(mixed[name], 0.7 * one[name] + 0.3 * two[name], 1e-13)
    assert max(float((one[name] - two[name]).abs().max()) for name in names) > 1e-3
    near = gradient(FedSpeed(rho=1e-9))
    for name in names:
        assert_close(near[name], one[name], 1e-6)


def test_a_gradient_of_zero_has_no_step_uphill() -> None:
    toy = quad(FedSpeed(rho=0.5), (2.0, 2.0), start=2.0)
    before = copy(toy.server)
    assert_close(toy.step([0, 1]), before, 1e-15)


def test_messages_are_one_model_each_way() -> None:
    for mean in ("cohort", "all"):
        toy = toy_of(FedSpeed(correction_mean=mean))
        size = num_bytes(toy.server["model"])
        toy.step([0, 2])
        assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))


def test_remarks_and_bounds() -> None:
    part = toy_of(FedSpeed()).context
    everyone = toy_of(FedSpeed(), TRAIN.model_copy(update={"clients_per_round": "all"})).context
    (said,) = FedSpeed().remarks(part)
    assert "algorithm.correction_mean=all" in said
    assert not FedSpeed().remarks(everyone) and not FedSpeed(correction_mean="all").remarks(part)
    for field, value in (("proximal_scale", 0.0), ("rho", -0.1), ("alpha", 1.1)):
        with pytest.raises(ValueError, match=field):
            FedSpeed(**{field: value})
