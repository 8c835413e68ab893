"""DFedSAM: limits that are DFedAvgM and FedSAM, rounds by hand, modes that agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.dfedavgm import DFedAvgM
from algorithms.dfedsam import DFedSAM
from algorithms.fedsam import FedSAM
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10, 9)
COHORTS = ([0, 1, 2, 4], [1, 3], [0, 1, 3, 4], [0, 1, 2, 3, 4])
TRAIN = TrainConfig(rounds=4, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


@MODES
@pytest.mark.parametrize("task", [two_layers, normalized_layers])
def test_inv_dfs_1_of_radius_0_it_is_dfedavgm(mode: str, task: Any) -> None:
    sharp, plain = (toy_of(a, task=task(), mode=mode) for a in (DFedSAM(radius=0), DFedAvgM()))
    for cohort in COHORTS:
        assert_equal(sharp.step(cohort), plain.step(cohort))
        assert_equal(sharp.states(), plain.states())


@MODES
@pytest.mark.parametrize("adaptive", [False, True])
def test_inv_dfs_2_a_complete_graph_of_all_is_fedsam_with_uniform_weights(mode: str, adaptive: bool) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": "all", "momentum": 0.5})
    peers = toy_of(DFedSAM(topology="complete", radius=0.3, adaptive=adaptive), train, normalized_layers(), mode=mode)
    served = FedSAM(aggregation="uniform", radius=0.3, adaptive=adaptive)
    server = toy_of(served, train, normalized_layers(), mode=mode)
    for _ in range(3):
        assert_close(peers.step()["model"], server.step()["model"], 1e-12)


def test_inv_dfs_3_rounds_are_those_of_an_oracle_in_plain_pytorch() -> None:
    toy = toy_of(DFedSAM(topology="ring", radius=0.2))
    initial: Tree = toy.server["model"]
    own: dict[int, Tree] = dict.fromkeys(range(5), initial)

    def slope(model: Tree, x: Any, y: Any) -> list[torch.Tensor]:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
        hidden = torch.relu(x @ leaves["inner.weight"].T + leaves["inner.bias"])
        loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], y)
        return list(torch.autograd.grad(loss, list(leaves.values())))

    for round, cohort in enumerate(COHORTS):
        ahead = {}
        for i in cohort:
            part, model = toy.dataset.load(i)["train"], own[i]
            size = len(part.y)
            plan = plan_batches(size, 4, 2 * -(-size // 4), toy.context.streams.generator("batches", round, i))
            for index in plan.batches(CPU):
                first = slope(model, part.x[index], part.y[index])
                length = torch.cat([leaf.flatten() for leaf in first]).norm()
                moved = {name: leaf + 0.2 * g / length for (name, leaf), g in zip(model.items(), first, strict=True)}
                second = slope(moved, part.x[index], part.y[index])
                model = {name: leaf - 0.1 * g for (name, leaf), g in zip(model.items(), second, strict=True)}
            ahead[i] = model
        linked = {i: [j for j in cohort if (i - j) % 5 in (1, 4)] for i in cohort}
        for i in cohort:
            weights = {j: 1 / (1 + max(len(linked[i]), len(linked[j]))) for j in linked[i]}
            weights[i] = 1 - sum(weights.values())
            own[i] = {name: sum(w * ahead[j][name] for j, w in weights.items()) for name in initial}
        toy.step(cohort)
        for i, state in toy.states().items():
            assert_close(state["model"], own[i], 1e-12)


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_vectorized_agrees_with_looped(double: bool, tolerance: float) -> None:
    assert_modes_agree(DFedSAM(radius=0.2, neighbours=1), (8, 12, 6, 10), TRAIN, double, tolerance)
