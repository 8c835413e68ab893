"""FedSMOO: an oracle in plain PyTorch, FedDyn and FedSpeed as special cases, fixed points, statistics, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.feddyn import FedDyn
from algorithms.fedsmoo import FedSMOO
from algorithms.fedspeed import FedSpeed
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, map_leaves, num_bytes, subtract, zeros_like
from rayfl.tasks.base import Batch, begin_step
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import length, slopes
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
MESSAGES = pytest.mark.parametrize("message", ["sum", "dual"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def quad(algorithm: Any, points: Any, start: float = 1.0, **train: Any) -> Toy:
    section = TrainConfig(**{"rounds": 3, "clients_per_round": "all", "batch_size": None, "lr": 0.1, **train})
    return Toy(algorithm, quadratic_clients(points, (1,) * len(points)), Quadratic(start=start), section)


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *all: sum(all) / len(all), *trees)


@MODES
@MESSAGES
def test_inv_smoo_1_rounds_are_those_of_an_oracle_in_plain_pytorch(message: Any, mode: str) -> None:
    """The algorithm with the paper's own dual variables lambda_i, lambda and beta = 1 / alpha."""
    beta, rho, train = 4.0, 0.3, TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(FedSMOO(alpha=1 / beta, radius=rho, message=message), train, mode=mode)
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    s, lam = zeros_like(w), zeros_like(w)
    lams, mus = ([zeros_like(w) for _ in SIZES] for _ in range(2))
    for round, cohort in enumerate(COHORTS):
        eta, ends, sent = 0.1 * 0.8**round, [], []
        for i in cohort:
            part, own = toy.dataset.load(i)["train"], copy(w)
            plan = plan_batches(SIZES[i], 4, 2 * -(-SIZES[i] // 4), streams.generator("batches", round, i))
            for index in plan.batches(CPU):
                x, y = part.x[index], part.y[index]
                first = slopes(network, own, x, y)
                u = {n: first[n] - mus[i][n] - s[n] for n in own}
                apart = {n: rho * u[n] / length(u) for n in own}
                mus[i] = {n: mus[i][n] + apart[n] - s[n] for n in own}
                second = slopes(network, {n: own[n] + apart[n] for n in own}, x, y)
                step = {n: second[n] - lams[i][n] + (own[n] - w[n]) / beta + 0.01 * own[n] for n in own}
                own = {n: own[n] - eta * step[n] for n in own}
            lams[i] = {n: lams[i][n] - (own[n] - w[n]) / beta for n in own}
            ends.append(own)
            sent.append({n: mus[i][n] + (apart[n] if message == "sum" else 0) for n in own})
        lam = {n: lam[n] - sum(end[n] - w[n] for end in ends) / (beta * len(SIZES)) for n in lam}
        w = {n: leaf - beta * lam[n] for n, leaf in mean(ends).items()}
        v = mean(sent)
        s = {n: rho * v[n] / length(v) for n in v}
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
        assert_close(toy.server["perturbation"], s, 1e-12)
        assert_close(map_leaves(lambda leaf: -leaf / beta, toy.server["displacement"]), lam, 1e-12)
        for i, state in toy.states().items():
            assert_close(map_leaves(lambda leaf: -leaf / beta, state["displacement"]), lams[i], 1e-12)
            assert_close(state["dual"], mus[i], 1e-12)
    assert min(float(length(tree)) for tree in (s, mus[0], lams[0])) > 1e-2


@MODES
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_inv_smoo_2_of_radius_0_it_is_feddyn(momentum: float, mode: str) -> None:
    train = TRAIN.model_copy(update={"momentum": momentum, "max_grad_norm": 2.0})
    one, other = (toy_of(method, train, mode=mode) for method in (FedSMOO(radius=0, alpha=0.25), FedDyn(alpha=0.25)))
    for cohort in COHORTS:
        assert_close(one.step(cohort), other.step(cohort), 1e-12)
    assert_close(one.states(), other.states(), 1e-12)


@MODES
@MESSAGES
def test_inv_smoo_3_a_vanishing_radius_changes_nothing(message: Any, mode: str) -> None:
    methods = FedSMOO(radius=1e-14, alpha=0.25, message=message), FedDyn(alpha=0.25)
    near, none = (toy_of(method, mode=mode, task=normalized_layers(0.4)) for method in methods)
    for cohort in COHORTS[2:]:
        assert_close(near.step(cohort)["model"], none.step(cohort)["model"], 1e-10)


@MODES
def test_inv_smoo_4_a_first_step_is_that_of_fedspeed(mode: str) -> None:
    """Without dual variables yet u is the gradient, and FedSpeed of all corrections looks there, too."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1})
    methods = FedSMOO(radius=0.4, alpha=0.2), FedSpeed(proximal_scale=5.0, rho=0.4, correction_mean="all")
    one, other = (toy_of(method, train, mode=mode) for method in methods)
    assert_close(one.step([0, 1, 3])["model"], other.step([0, 1, 3])["model"], 1e-12)
    assert length(subtract(one.step([0, 1])["model"], other.step([0, 1])["model"])) > 1e-3


@MODES
def test_inv_smoo_5_two_steps_on_a_quadratic_by_hand(mode: str) -> None:
    """Of |theta - a|^2 / 2 the gradient is theta - a; s_i goes where what the dual variable leaves of it points."""
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=2, batch_size=None, lr=0.1)
    toy = Toy(FedSMOO(radius=0.5, alpha=0.2), quadratic_clients([[4.0, 5.0]], [6]), Quadratic(2), train, mode=mode)
    # from (1, 1): u = (-3, -4), s_i = (-0.3, -0.4), w = (1, 1) + 0.1 (3.3, 4.4) = (1.33, 1.44), mu = (-0.3, -0.4)
    # then u = (-2.67, -3.56) + (0.3, 0.4) = 0.79 (-3, -4), s_i as before, mu = (-0.6, -0.8)
    # grad f(w + s_i) = (-2.97, -3.96), alpha (w - w_t) = (0.066, 0.088): w = (1.33, 1.44) + 0.1 (2.904, 3.872)
    server = toy.step()
    assert server["displacement"]["theta"].tolist() == pytest.approx([0.6204, 0.8272], abs=1e-14)
    assert toy.states()[0]["dual"]["theta"].tolist() == pytest.approx([-0.6, -0.8], abs=1e-14)
    assert server["perturbation"]["theta"].tolist() == pytest.approx([-0.3, -0.4], abs=1e-14)


def test_inv_smoo_6_where_clients_agree_the_dual_variables_rest() -> None:
    """Where every u points as s does, s_i is s, and neither mu_i nor s moves, though the gradients do."""
    toy = quad(FedSMOO(radius=0.5, alpha=0.1), (9.0, 9.5), start=0.0, local_epochs=3)
    toy.server = {**toy.server, "perturbation": {"theta": torch.full_like(toy.server["model"]["theta"], -0.5)}}
    before = copy(toy.server["perturbation"])
    toy.step([0, 1])
    assert_close(toy.server["perturbation"], before, 1e-15)
    assert all(float(state["dual"]["theta"].abs().max()) < 1e-15 for state in toy.states().values())
    assert float(toy.server["model"]["theta"]) > 1


def test_a_difference_of_zero_has_no_direction() -> None:
    """At a minimum, without dual variables, u is 0: nothing moves, and s stays 0."""
    toy = quad(FedSMOO(radius=0.5), (2.0, 2.0), start=2.0)
    before = copy(toy.server)
    assert_close(toy.step([0, 1]), before, 1e-15)


@MESSAGES
def test_s_has_the_length_rho_and_stays_where_a_round_has_no_steps(message: Any) -> None:
    toy = toy_of(FedSMOO(radius=0.3, message=message))
    for cohort in COHORTS:
        assert abs(float(length(toy.step(cohort)["perturbation"])) - 0.3) < 1e-12
    idle = toy_of(FedSMOO(radius=0.3, message=message), TRAIN.model_copy(update={"local_epochs": 0}))
    before = copy(idle.server)
    assert_equal(idle.step([0, 1]), before)


@MESSAGES
@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_vectorized_agrees_with_looped(message: Any, double: bool) -> None:
    method = FedSMOO(radius=0.3, message=message)
    assert_modes_agree(method, SIZES, TRAIN, double, 1e-10 if double else 1e-4)


@pytest.mark.parametrize("changes", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "persist_optimizer": True}])
def test_the_dual_variables_are_summed_up_under_any_optimizer(changes: dict[str, Any]) -> None:
    """One local step after another, mu_i moves by no more than 2 rho, whatever moves w."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1, **changes})
    looped, stacked = (toy_of(FedSMOO(radius=0.3), train, mode=mode) for mode in ("looped", "vectorized"))
    before = {client: zeros_like(looped.server["perturbation"]) for client in range(4)}
    for cohort in COHORTS:
        s = copy(looped.server["perturbation"])
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
        for client in cohort:
            dual = looped.states()[client]["dual"]
            own = add_scaled(subtract(dual, before[client]), s, 1)
            assert abs(float(length(own)) - 0.3) < 1e-12
            before[client] = copy(dual)


@MODES
def test_running_statistics_are_those_at_w_and_are_averaged(mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1})
    uphill, plain = (
        toy_of(FedSMOO(radius=rho), train, task=normalized_layers(), dataset=random_clients((9, 5)), mode=mode)
        for rho in (3.0, 0.0)
    )
    left, right = (toy.step([0, 1])["model"] for toy in (uphill, plain))
    network = uphill.task.network
    assert network.buffer_names
    for name in network.buffer_names:
        assert_close(left[name], right[name], 1e-13)
    assert (left["inner.weight"] - right["inner.weight"]).abs().max() > 1e-3
    for name in ("dual", "displacement"):
        assert set(uphill.states()[0][name]) == set(network.parameter_names)


def test_the_objective_renews_the_dual_variable_by_a_step_of_length_one() -> None:
    task, part = normalized_layers(0.5), random_clients((12,)).load(0)["train"]
    batch, names = Batch(part.x, part.y), task.network.parameter_names
    model, dual, shared, last = (task.network.initialize(seed) for seed in range(4))
    method = FedSMOO(radius=0.5, alpha=0.1)

    def gradient(value: Any, of: dict[str, Tree]) -> dict[str, Tree]:
        flat = [(key, name) for key in of for name in names]
        found = torch.autograd.grad(value, [of[key][name] for key, name in flat])
        return {key: {name: leaf for (one, name), leaf in zip(flat, found, strict=True) if one == key} for key in of}

    def moved(tree: Tree) -> Tree:
        return {name: leaf.clone().requires_grad_(name in names) for name, leaf in tree.items()}

    begin_step(task, torch.tensor(7))
    first = gradient(task.loss(one := moved(model), batch), {"model": one})["model"]
    begin_step(task, torch.tensor(7))
    trained = {key: moved(tree) for key, tree in (("model", model), ("dual", dual), ("last", last))}
    for key in ("dual", "last"):
        trained[key] = {name: trained[key][name] for name in names}
    frozen = {"anchor": {name: model[name] for name in names}, "perturbation": {name: shared[name] for name in names}}
    found = gradient(method.objective(trained, batch, task, frozen, None), trained)
    apart = method.perturbation(first, dual, shared)
    begin_step(task, torch.tensor(7))
    there = moved({**model, **{name: model[name] + apart[name] for name in names}})
    second = gradient(task.loss(there, batch), {"model": there})["model"]
    for name in names:
        assert_close(found["model"][name], second[name], 1e-13)
        assert_close(found["dual"][name], shared[name] - apart[name], 1e-13)
        assert_close(last[name] - found["last"][name], apart[name], 1e-13)


def test_messages_are_two_models_each_way_and_one_without_uphill() -> None:
    for radius, factor in ((0.1, 2), (0.0, 1)):
        toy = toy_of(FedSMOO(radius=radius))
        size = factor * num_bytes(toy.server["model"])
        toy.step([0, 2])
        assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))


def test_what_is_undefined_is_refused() -> None:
    clipped = TRAIN.model_copy(update={"max_grad_norm": 10.0})
    toy = toy_of(FedSMOO(), clipped)
    with pytest.raises(ConfigError, match=r"algorithm\.radius above 0.*train\.max_grad_norm=null"):
        FedSMOO().check(toy.task, toy.context)
    FedSMOO(radius=0).check(toy.task, toy.context)
    for field, value in (("alpha", 0.0), ("radius", -0.1), ("message", "s")):
        with pytest.raises(ValueError, match=field):
            FedSMOO(**{field: value})
