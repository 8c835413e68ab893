"""pFedMe: invariants PFM, the algorithm step by step, its options, refusals and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.local import Local
from algorithms.pfedme import PFedMe
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, interpolate
from rayfl.tasks.base import Batch
from tests.support.planted import accuracies, related_clients
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1)
ALGORITHM = PFedMe(proximal_weight=2.0, inner_steps=3, personal_lr=0.05, personal_decay=0.01)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any = ALGORITHM, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def by_the_book(toy: Toy, client: int, w: Tree, lr: float, personal_lr: float, batches: int) -> tuple[Tree, Tree]:
    """theta_k and w_k of Algorithm 1, update by update."""
    method: PFedMe = toy.algorithm  # type: ignore[assignment]
    part = toy.dataset.load(client)["train"]
    stream = toy.context.streams.generator("batches", toy.round, client)
    theta = w
    for index in plan_batches(len(part), toy.train.batch_size, batches, stream).batches(CPU):
        batch = Batch(part.x[index], part.y[index])
        for _ in range(method.inner_steps):
            point = {name: leaf.clone().requires_grad_() for name, leaf in theta.items()}
            parts = torch.autograd.grad(toy.task.loss(point, batch), list(point.values()))
            gradient = dict(zip(point, parts, strict=True))
            theta = {
                name: leaf
                - personal_lr
                * (gradient[name] + method.proximal_weight * (leaf - w[name]) + method.personal_decay * leaf)
                for name, leaf in theta.items()
            }
        w = {name: leaf - lr * method.proximal_weight * (leaf - theta[name]) for name, leaf in w.items()}
    return theta, w


def published(toy: Toy, client: int, row: str) -> list[float]:
    """Statistics of a model of the last round's cohort, right after its training."""
    values: list[float] = toy.federation.trained_scores[client]["test"][row].vector.tolist()
    return values


def mean(trees: list[Tree]) -> Tree:
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}


@MODES
@pytest.mark.parametrize("iterations", [None, 1, 4, 5])
def test_pfedme_is_algorithm_1(iterations: int | None, mode: str) -> None:
    algorithm = ALGORITHM.model_copy(update={"local_iterations": iterations})
    train = TRAIN.model_copy(update={"lr_decay": 0.5})
    toy = toy_of(algorithm, train, mode=mode)
    for round, cohort in enumerate(([0, 1], [1, 2, 3], [0, 3])):
        w = copy(toy.server["model"])
        batches = {k: iterations or 2 * -(-SIZES[k] // 4) for k in cohort}
        rates = 0.1 * 0.5**round, 0.05 * 0.5**round
        found = {k: by_the_book(toy, k, w, *rates, batches[k]) for k in cohort}
        toy.step(cohort)
        for client, (theta, _) in found.items():
            assert_close(toy.states()[client]["personal"], theta, 1e-12)
        assert_close(toy.server["model"], mean([moved for _, moved in found.values()]), 1e-12)


@MODES
def test_inv_pfm_1_without_pull_the_server_rests_and_clients_repeat_each_batch(mode: str) -> None:
    algorithm = PFedMe(proximal_weight=0.0, inner_steps=3, personal_lr=0.05, personal_decay=0.0)
    toy = toy_of(algorithm, mode=mode)
    start = copy(toy.server["model"])
    for cohort in ([0, 1], [1, 2, 3]):
        expected = {}
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            stream = toy.context.streams.generator("batches", toy.round, client)
            theta = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
            optimizer = torch.optim.SGD(theta.values(), lr=0.05)
            for index in plan_batches(len(part), 4, 2 * -(-len(part) // 4), stream, 3).batches(CPU):
                optimizer.zero_grad()
                toy.task.loss(theta, Batch(part.x[index], part.y[index])).backward()
                optimizer.step()
            expected[client] = {name: leaf.detach() for name, leaf in theta.items()}
        assert_equal(toy.step(cohort)["model"], start)
        for client, theta in expected.items():
            assert_close(toy.states()[client]["personal"], theta, 1e-12)


def test_inv_pfm_2_many_inner_steps_follow_the_gradient_of_the_moreau_envelope() -> None:
    points, pull, eta, iterations = [0.0, 4.0], 0.5, 0.1, 3
    algorithm = PFedMe(
        proximal_weight=pull, inner_steps=100, personal_lr=0.5, personal_decay=0.0, local_iterations=iterations
    )
    train = TrainConfig(rounds=1, clients_per_round=1, batch_size=None, lr=eta)
    for client, point in enumerate(points):
        toy = Toy(algorithm, quadratic_clients(points, [1, 3]), Quadratic(), train)
        w = theta = 1.0
        for _ in range(iterations):
            theta = (point + pull * w) / (1 + pull)
            w -= eta * pull / (1 + pull) * (w - point)
        assert abs(float(toy.step([client])["model"]["theta"]) - w) < 1e-12
        assert abs(float(toy.states()[client]["personal"]["theta"]) - theta) < 1e-12


def test_inv_pfm_3_with_beta_0_the_server_rests() -> None:
    toy = toy_of(ALGORITHM.model_copy(update={"server_mix": 0.0}))
    start = copy(toy.server["model"])
    for cohort in ([0, 1], [1, 2, 3]):
        assert_equal(toy.step(cohort)["model"], start)
    for state in toy.states().values():
        assert not torch.equal(state["personal"]["head.weight"], start["head.weight"])


def test_inv_pfm_4_with_beta_1_the_server_takes_over_a_single_client() -> None:
    for client in range(len(SIZES)):
        toy = toy_of()
        start = copy(toy.server["model"])
        _, moved = by_the_book(toy, client, start, 0.1, 0.05, 2 * -(-SIZES[client] // 4))
        toy.step([client])
        assert_close(toy.server["model"], moved, 1e-12)
        sent = published(toy, client, "local")
        assert toy.scores()[client]["global"].vector.tolist() == sent


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_server_mix_steps_towards_the_mean(beta: float) -> None:
    whole, mixed = (toy_of(ALGORITHM.model_copy(update={"server_mix": b})) for b in (1.0, beta))
    start = copy(whole.server["model"])
    end = whole.step([0, 1, 3])["model"]
    assert_close(mixed.step([0, 1, 3])["model"], interpolate(start, end, beta), 1e-12)
    assert_equal(mixed.states(), whole.states())


def test_w_moves_after_each_mini_batch_but_the_first_of_the_pass() -> None:
    flags = ALGORITHM.renewals(np.random.default_rng(0), 9)["renew"]
    assert flags.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0]
    single = ALGORITHM.model_copy(update={"inner_steps": 1})
    assert single.renewals(np.random.default_rng(0), 4)["renew"].tolist() == [0, 1, 1, 1]


def test_without_batches_nothing_moves() -> None:
    toy = toy_of(ALGORITHM.model_copy(update={"local_iterations": 0}))
    start = copy(toy.server["model"])
    assert_equal(toy.step([0, 1])["model"], start)
    assert_equal(toy.states()[0]["personal"], start)


def test_momentum_is_refused_unless_it_is_that_of_the_personal_model() -> None:
    toy = toy_of()
    ALGORITHM.check(toy.task, toy.context)
    for change, message in (
        ({"momentum": 0.5}, r"train\.momentum=0.*momentum_on_personal=true"),
        ({"weight_decay": 0.1}, r"personal_decay.*train\.weight_decay=0"),
        ({"max_grad_norm": 1.0}, r"train\.max_grad_norm"),
    ):
        context = toy_of(train=TRAIN.model_copy(update=change)).context
        with pytest.raises(ConfigError, match=message):
            ALGORITHM.check(toy.task, context)
    allowed = ALGORITHM.model_copy(update={"momentum_on_personal": True})
    allowed.check(toy.task, toy_of(train=TRAIN.model_copy(update={"momentum": 0.5})).context)


def test_momentum_on_personal_moves_theta_alone() -> None:
    point, eta, personal_lr, pull, decay, momentum = 4.0, 0.1, 0.05, 2.0, 0.01, 0.5
    algorithm = ALGORITHM.model_copy(update={"momentum_on_personal": True})
    train = TrainConfig(rounds=1, local_epochs=4, batch_size=None, lr=eta, momentum=momentum)
    toy = Toy(algorithm, quadratic_clients([point], [2]), Quadratic(), train)
    w, theta, velocity = 1.0, 1.0, 0.0
    for _ in range(4):
        for _ in range(3):
            velocity = momentum * velocity + theta - point + pull * (theta - w) + decay * theta
            theta -= personal_lr * velocity
        w -= eta * pull * (w - theta)
    assert abs(float(toy.step([0])["model"]["theta"]) - w) < 1e-12
    assert abs(float(toy.states()[0]["personal"]["theta"]) - theta) < 1e-12


def test_running_statistics_are_recorded_by_theta_and_sent_with_w() -> None:
    toy = toy_of(task=normalized_layers())
    start = copy(toy.server["model"])
    toy.step([0, 1])
    for name in toy.task.network.buffer_names:
        own = [toy.states()[client]["personal"][name] for client in (0, 1)]
        assert_close(toy.server["model"][name], torch.stack(own).mean(0), 1e-12)
        assert not torch.equal(toy.server["model"][name], start[name])


def test_personal_row_is_theta_and_before_the_first_update_the_initial_model() -> None:
    toy = toy_of()
    initial = toy.scores()[3]["global"].vector
    toy.step([0, 1])
    own = published(toy, 0, "personalized")
    rows = toy.scores()
    assert rows[3]["personalized"].vector.tolist() == initial.tolist()
    assert rows[0]["personalized"].vector.tolist() == own != rows[0]["global"].vector.tolist()


def test_vectorized_agrees_with_looped_and_others_keep_their_models() -> None:
    looped, stacked = (toy_of(mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2], [1, 3], [0, 1, 2, 3], [2]):
        before = looped.states()
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
        for client in set(before) - set(cohort):
            assert_equal(looped.states()[client], before[client])


@pytest.mark.slow
def test_personal_models_beat_the_global_and_the_local_ones() -> None:
    clients = related_clients(own=0.8)
    found = accuracies(PFedMe(proximal_weight=0.3, personal_lr=0.1), clients, lr=0.6, rounds=15)
    assert found["personalized"] > found["global"] + 0.02
    assert found["personalized"] > accuracies(Local(), clients)["personalized"] + 0.02
