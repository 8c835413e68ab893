"""FedLD: an oracle in plain PyTorch, what a principal step does, limits that are federated averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedld import FedLD, principal_step
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, copy
from tests.support.partial_toys import SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

ROUNDS = [[0, 1, 2, 3], [1, 2], [0, 1, 3], [2]]
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def trained(toy: Toy, model: Tree, client: int, weight: float) -> Tree:
    """A client's local update in plain PyTorch."""
    part = toy.dataset.load(client)["train"]
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", toy.round, client)
    for index in plan_batches(SIZES[client], 4, 2 * -(-SIZES[client] // 4), generator).batches(CPU):
        optimizer.zero_grad()
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        z = hidden @ leaves["head.weight"].T + leaves["head.bias"]
        sure = torch.log(1 + torch.norm(torch.softmax(z, 1)) ** 2)
        (F.cross_entropy(z, part.y[index]) + weight * sure).backward()
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def stepped(changes: Tensor, share: float) -> Tensor:
    """The server's step, client by client and direction by direction, by a decomposition of the changes themselves."""
    m = len(changes)
    u, roots, _ = torch.linalg.svd(changes.T, full_matrices=False)
    values = roots**2 / m
    total = torch.zeros_like(changes[0])
    for g in changes:
        for j in range(max(1, int(share * m))):
            projected = torch.dot(g, u[:, j]) * u[:, j]
            if projected.norm() > 0:
                total += values[j] / values.sum() * g.norm() * projected / projected.norm() / m
    return total


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin_weight": 0.5, "direction_share": 0.5, "mean_rounds": 0},
        {"aggregation": "samples", "mean_rounds": 2},
    ],
)
def test_inv_fedld_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = FedLD(**options)
    toy = toy_of(method, task=two_layers(), mode=mode)
    model = initial(toy)
    for round, cohort in enumerate(ROUNDS):
        models = [trained(toy, model, client, method.margin_weight) for client in cohort]
        sizes = [1 if method.aggregation == "uniform" else SIZES[client] for client in cohort]
        found = {}
        for name, leaf in model.items():
            changes = torch.stack([(one[name] - leaf).flatten() for one in models])
            shares = torch.tensor(sizes).double() / sum(sizes)
            step = shares @ changes if round < method.mean_rounds else stepped(changes, method.direction_share)
            found[name] = leaf + step.view_as(leaf)
        model = found
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-11)


def random_changes(count: int, size: int = 30) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_inv_fedld_2_a_step_is_no_longer_than_the_changes_and_grows_with_them(count: int) -> None:
    changes = random_changes(count)
    step = principal_step(changes, 1.0)
    assert step.norm() <= changes.norm(dim=1).mean() + 1e-12
    assert_close(principal_step(3 * changes, 1.0), 3 * step, 1e-12)
    assert_close(principal_step(changes.flip(0), 1.0), step, 1e-12)
    assert_close(principal_step(changes, 0.01), stepped(changes, 1 / count), 1e-12)


def test_inv_fedld_3_clients_that_agree_move_as_they_say() -> None:
    one = random_changes(1)
    assert_close(principal_step(one, 0.8), one[0], 1e-12)
    assert_close(principal_step(one.expand(5, -1), 0.8), one[0], 1e-12)
    lengths = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    assert_close(principal_step(lengths * one, 0.8), 3 * one[0], 1e-12)


def test_inv_fedld_4_a_client_that_goes_elsewhere_counts_for_little() -> None:
    """Nine clients go one way, and one goes at a right angle: by s_j, 0.9 and 0.1, of the mean lengths 0.9 and 0.1."""
    changes = torch.zeros(10, 4, dtype=torch.float64)
    changes[:9, 0], changes[9, 1] = 1.0, 1.0
    assert_close(principal_step(changes, 1.0), torch.tensor([0.81, 0.01, 0, 0]).double(), 1e-7)


def test_without_any_change_a_tensor_stays() -> None:
    assert_equal(principal_step(torch.zeros(3, 2, dtype=torch.float64), 0.8), torch.zeros(2, dtype=torch.float64))


@MODES
def test_inv_fedld_5_with_the_mean_alone_it_is_fedavg(mode: str) -> None:
    method = FedLD(margin_weight=0, mean_rounds=9, aggregation="samples")
    one, other = (toy_of(a, mode=mode, task=three_layers()) for a in (method, FedAvg()))
    for cohort in ROUNDS:
        assert_close(one.step(cohort), other.step(cohort), 1e-12)


def test_buffers_are_averaged_and_modes_agree_on_them() -> None:
    looped, stacked = (toy_of(FedLD(), task=normalized_layers(0.3), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ROUNDS[:2]:
        one = copy(looped.server["model"])
        assert_close(stacked.step(cohort), looped.step(cohort), 1e-10)
        assert not torch.equal(one["norm.running_mean"], looped.server["model"]["norm.running_mean"])


def test_inv_fedld_6_the_term_makes_models_unsure() -> None:
    top = []
    for weight in (0.0, 1.0):
        toy = toy_of(FedLD(margin_weight=weight), task=two_layers())
        for _ in range(TRAIN.rounds):
            toy.step([0, 1, 2, 3])
        x = torch.cat([toy.dataset.load(client)["test"].x for client in range(4)])
        top.append(float(toy.task.network.logits(toy.server["model"], x).softmax(1).amax(1).mean()))
    assert top[1] < top[0] - 0.02
