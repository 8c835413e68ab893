"""FedMGDA+: an oracle in plain PyTorch, federated averaging, common descent, and updates that count by direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedmgda import FedMGDA
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import MethodError
from rayfl.messages.aggregators import Median
from rayfl.messages.attack import AttackConfig
from rayfl.params import Tree, copy, num_bytes
from tests.algorithms.parts.test_least_norm import by_enumeration
from tests.support.partial_toys import SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

COHORTS = ([0, 1, 2, 3], [1, 3], [0, 2, 3], [2])


def trained(toy: Toy, model: Tree, client: int, round: int) -> Tree:
    """The client's model after a local update."""
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(toy.task.network.logits(leaves, part.x[index]), part.y[index]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def flat(model: Tree) -> np.ndarray:
    return torch.cat([leaf.flatten() for leaf in model.values()]).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tolerance": 1.0, "server_lr": 0.5},
        {"tolerance": 0.3, "aggregation": "uniform"},
        {"tolerance": 0.2, "normalize": False},
    ],
    ids=["default", "any", "uniform", "lengths"],
)
def test_inv_mg_1_rounds_are_those_of_an_oracle_in_plain_pytorch(settings: dict[str, Any]) -> None:
    method = FedMGDA(**settings)
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate(COHORTS):
        updates = np.stack([flat(trained(toy, model, client, round)) - flat(model) for client in cohort])
        if method.normalize:
            updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        sizes = np.array([1.0 if method.aggregation == "uniform" else SIZES[client] for client in cohort])
        weights = by_enumeration(updates @ updates.T, sizes / sizes.sum(), method.tolerance)
        moved = torch.from_numpy(flat(model) + method.server_lr * weights @ updates)
        pieces = moved.split([leaf.numel() for leaf in model.values()])
        model = {name: piece.view(leaf.shape) for (name, leaf), piece in zip(model.items(), pieces, strict=True)}
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_mg_2_without_tolerance_and_normalization_it_is_federated_averaging(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedMGDA(tolerance=0, normalize=False, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        ours.step(cohort)
        theirs.step(cohort)
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_close(ours.server["model"], theirs.server["model"], 1e-12)
    assert num_bytes(ours.server) == num_bytes(theirs.server)


@pytest.mark.parametrize("normalize", [True, False])
def test_inv_mg_3_the_step_turns_away_from_no_update(normalize: bool) -> None:
    toy = toy_of(FedMGDA(tolerance=1, normalize=normalize), task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate(COHORTS):
        updates = [flat(trained(toy, model, client, round)) - flat(model) for client in cohort]
        step = flat(toy.step(cohort)["model"]) - flat(model)
        for update in updates:
            unit = update / np.linalg.norm(update) if normalize else update
            assert unit @ step >= step @ step * (1 - 1e-9)
        assert np.linalg.norm(step) <= 1 + 1e-12 or not normalize
        model = copy(toy.server["model"])


def test_inv_mg_4_a_client_alone_gives_the_direction() -> None:
    toy = toy_of(FedMGDA(server_lr=0.25), task=two_layers())
    model = initial(toy)
    update = flat(trained(toy, model, 1, 0)) - flat(model)
    step = flat(toy.step([1])["model"]) - flat(model)
    assert_close(torch.from_numpy(step), torch.from_numpy(0.25 * update / np.linalg.norm(update)), 1e-12)


def test_inv_mg_5_how_long_an_update_is_counts_nothing() -> None:
    """A malicious client that sends its update ten times as long changes the round by round-off alone."""
    attack = AttackConfig(clients=(2,), message="scaled", strength=10.0)
    one, other = toy_of(FedMGDA(), task=two_layers()), toy_of(FedMGDA(), task=two_layers(), attack=attack)
    assert_close(one.step([0, 1, 2])["model"], other.step([0, 1, 2])["model"], 1e-10)


def test_clients_that_do_not_move_stop_the_server_only_where_they_may_have_all_weight() -> None:
    train = TRAIN.model_copy(update={"lr": 0.0, "weight_decay": 0.0})
    toy = toy_of(FedMGDA(tolerance=1), train, two_layers())
    before = initial(toy)
    assert_equal(toy.step([0, 1])["model"], before)


def test_robust_rules_are_refused() -> None:
    toy = toy_of(FedMGDA(), task=two_layers(), aggregator=Median())
    with pytest.raises(MethodError):
        toy.step([0, 1, 2])


@pytest.mark.parametrize("private", ["none", "statistics", "all"])
def test_buffers_are_means_and_private_layers_stay_with_the_clients(private: str) -> None:
    train = TRAIN.model_copy(update={"private_norm": private})
    toys = [toy_of(FedMGDA(), train, normalized_layers(), mode=mode) for mode in ("looped", "vectorized")]
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server, toys[1].server, 1e-9)
    assert all(leaf.isfinite().all() for leaf in toys[0].server["model"].values())
