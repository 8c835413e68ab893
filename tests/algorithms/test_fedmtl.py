"""FedMTL: invariants MTL of rounds, relationships, special cases, optima, and messages."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from torch import Tensor

from algorithms.fedmtl import FedMTL, learned_relationship, mean_relationship
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10, 9)
COHORTS = ([0, 1, 2, 4], [1, 3], [0, 1, 3, 4], [2], [0, 1, 2, 3, 4])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    data = options.pop("dataset", random_clients(SIZES))
    return Toy(algorithm, data, task or two_layers(), train, **options)


def vector(model: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


def plain_steps(toy: Toy, start: Tree, client: int, round: int, penalty: Any) -> Tree:
    """Plain SGD on the cross-entropy and a penalty of the whole model."""
    part, train = toy.dataset.load(client)["train"], toy.train
    generator = toy.context.streams.generator("batches", round, client)
    plan = plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.1 * 0.9**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index])
        (loss + penalty(vector(leaves))).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def omega_of(columns: Tensor, relationship: str, damping: float) -> Tensor:
    m = columns.shape[1]
    if relationship == "mean":
        # as it is written in papers: the square of a projection
        return torch.tensor(np.linalg.matrix_power(np.eye(m) - np.ones((m, m)) / m, 2))
    root = np.real(sqrtm((columns.T @ columns).numpy()))
    return torch.tensor(np.linalg.inv(root / np.trace(root) + damping * np.eye(m)))


def traced(initial: Tensor, columns: Tensor, omega: Tensor, place: int | None, weight: float, w: Tensor) -> Any:
    """lambda/2 tr(W Omega W^T) with a model in the place of the client's column."""
    if place is None:
        return 0.0
    whole = torch.cat([columns[:, :place], (w - initial)[:, None], columns[:, place + 1 :]], 1)
    return weight / 2 * torch.trace(whole @ omega @ whole.T)


@pytest.mark.parametrize(("relationship", "damping"), [("mean", 0.1), ("learned", 0.3), ("learned", 0.05)])
def test_inv_mtl_1_rounds_descend_the_trace_by_autograd(relationship: Any, damping: float) -> None:
    toy = toy_of(FedMTL(penalty_weight=0.4, relationship=relationship, damping=damping))
    initial: Tree = toy.server["model"]
    own: dict[int, Tree] = {}
    for round, cohort in enumerate(COHORTS):
        known = list(own)
        columns = torch.stack([vector(own[j]) - vector(initial) for j in known], 1) if known else torch.zeros(0, 0)
        omega = omega_of(columns, relationship, damping) if known else columns
        trained = {}
        for client in cohort:
            alone = client not in known or len(known) == 1
            place = None if alone else known.index(client)
            penalty = partial(traced, vector(initial), columns, omega, place, 0.4)
            trained[client] = plain_steps(toy, own.get(client, initial), client, round, penalty)
        own |= trained
        toy.step(cohort)
        assert_close(toy.server["own"], {str(client): model for client, model in own.items()}, 1e-12)
        for client, state in toy.states().items():
            assert_close(state["personal"], own[client], 1e-12)
    scores = toy.scores()
    for client in range(len(SIZES)):
        part, model = toy.dataset.load(client)["test"], own[client]
        found = float(F.cross_entropy(toy.task.network.logits(model, part.x), part.y))
        assert scores[client]["personalized"].loss == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("relationship", ["mean", "learned"])
def test_inv_mtl_2_without_a_penalty_it_is_local_training(relationship: Any, task: Any) -> None:
    pulled = toy_of(FedMTL(penalty_weight=0, relationship=relationship), task=task())
    local = toy_of(Local(), task=task())
    for cohort in COHORTS:
        pulled.step(cohort)
        local.step(cohort)
    for client, state in local.states().items():
        assert_equal(pulled.states()[client]["personal"], state["local"])


@pytest.mark.parametrize("relationship", ["mean", "learned"])
def test_inv_mtl_3_at_first_and_alone_clients_train_locally(relationship: Any) -> None:
    pulled, local = toy_of(FedMTL(penalty_weight=0.4, relationship=relationship)), toy_of(Local())
    for cohort in ([0], [0], [0], [1, 2]):
        pulled.step(cohort)
        local.step(cohort)
        for client in cohort:
            assert_equal(pulled.states()[client]["personal"], local.states()[client]["local"])
    pulled.step([0])
    local.step([0])
    assert (vector(pulled.states()[0]["personal"]) - vector(local.states()[0]["local"])).abs().max() > 1e-3


def test_inv_mtl_4_the_mean_relationship_is_that_of_distances_to_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    distances = (w - w.mean(1, keepdim=True)).square().sum()
    for shift in (0, torch.randn(7, 1, generator=generator, dtype=torch.float64)):
        assert abs(torch.trace((w + shift) @ mean_relationship(4) @ (w + shift).T) - distances) < 1e-12


@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
def test_inv_mtl_5_the_learned_relationship_has_its_eigenvalues(damping: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    w[:, 4] = w[:, 0]  # singular
    omega = learned_relationship(w.T @ w, damping)
    singular = torch.linalg.svdvals(w)
    expected = 1 / (singular / singular.sum() + damping)
    assert_close(torch.linalg.eigvalsh(omega) / expected.sort().values, torch.ones(5).double(), 1e-6)
    assert float(omega.diagonal().max()) <= 1 / damping + 1e-9
    # like tasks attract each other, opposite ones are drawn apart
    assert float(omega[0, 4]) < 0
    opposite = torch.stack([w[:, 0], -w[:, 0], w[:, 1]], 1)
    assert float(learned_relationship(opposite.T @ opposite, damping)[0, 1]) > 0
    unrelated = learned_relationship(torch.zeros(4, 4).double(), damping)
    assert_close(unrelated, torch.eye(4).double() / (0.25 + damping), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.1, 5.0))])
def test_inv_mtl_6_models_go_to_the_optimum_of_the_objective(weight: float) -> None:
    """With F_i = 1/2 (w_i - p_i)^2 it is w_i = (p_i + lambda wbar) / (1 + lambda), whose mean is that of the p_i."""
    points = [-3.0, 1.0, 2.0, 8.0]
    train = TrainConfig(rounds=80, clients_per_round="all", local_epochs=3, batch_size=None, lr=0.1)
    toy = Toy(FedMTL(penalty_weight=weight), quadratic_clients(points, [1, 2, 1, 3]), Quadratic(start=5.0), train)
    toy.run()
    for client, point in enumerate(points):
        found = float(toy.server["own"][str(client)]["theta"])
        assert abs(found - (point + weight * 2) / (1 + weight)) < 1e-6


def test_clients_that_are_not_sampled_keep_their_models() -> None:
    toy = toy_of(FedMTL())
    toy.step([0, 1, 2])
    before = copy(toy.server["own"])
    toy.step([2, 3])
    assert set(toy.server["own"]) == {"0", "1", "2", "3"}
    for client in ("0", "1"):
        assert_equal(toy.server["own"][client], before[client])
    after = copy(toy.server)
    assert_equal(toy.step([]), after)


def test_messages_are_parameters_and_a_number() -> None:
    toy = toy_of(FedMTL(relationship="learned"), task=normalized_layers(), hosts=2)
    network = toy.task.network
    size = sum(toy.server["model"][name].nbytes for name in network.parameter_names)
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size + 8, size))
    assert network.buffer_names
    for model in toy.server["own"].values():
        assert set(model) == set(network.parameter_names)
    statistics = [state["personal"]["norm.running_mean"] for state in toy.states().values()]
    assert not torch.equal(statistics[0], statistics[1])


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_is_in_no_message(policy: Any) -> None:
    train = TRAIN.model_copy(update={"private_norm": policy})
    toy = toy_of(FedMTL(relationship="learned"), train, normalized_layers())
    for cohort in COHORTS:
        toy.step(cohort)
    for model in toy.server["own"].values():
        assert (model["norm.weight"].numel() == 0) == (policy == "all")
    assert all(score["personalized"].loss > 0 for score in toy.scores().values())


def test_a_newcomer_has_a_model_that_it_trained_alone() -> None:
    toy = toy_of(FedMTL(), unseen=1)
    for cohort in ([0, 1], [1, 2]):
        toy.step(cohort)
    part = toy.dataset.load(4)["test"]
    alone = plain_steps(toy, toy.server["model"], 4, 1, lambda w: 0.0)
    found = float(F.cross_entropy(toy.task.network.logits(alone, part.x), part.y))
    assert toy.scores(final=True, newcomers=True)[4]["personalized"].loss == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "largest", "moved"),
    [({"penalty_weight": 10.0}, "1", "1"), ({"penalty_weight": 1.0, "relationship": "learned"}, "10", "1")],
)
def test_pulls_that_overshoot_are_refused(settings: Any, largest: str, moved: str) -> None:
    toy = toy_of(FedMTL(**settings))
    with pytest.raises(ConfigError, match=re.escape(f"possible Omega_ii, {largest}, is {moved}, not below 1")):
        toy.algorithm.check(toy.task, toy.context)
    adam = toy_of(FedMTL(**settings), TrainConfig(rounds=2, clients_per_round=2, optimizer="adam"))
    adam.algorithm.check(adam.task, adam.context)
    toy_of(FedMTL()).algorithm.check(toy.task, toy.context)


@pytest.mark.parametrize("relationship", ["mean", "learned"])
@pytest.mark.parametrize("double", [True, False])
def test_looped_and_vectorized_agree(relationship: Any, double: bool) -> None:
    method = FedMTL(penalty_weight=0.5, relationship=relationship)
    assert_modes_agree(method, (8, 12, 6, 10), TRAIN, double, 1e-10 if double else 1e-4)
