"""FedACG: rounds in plain PyTorch, limits that are other methods, what the momentum is, buffers, traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedacg import FedACG
from algorithms.fedavg import FedAvg
from algorithms.fedopt import FedAvgM
from algorithms.fedprox import FedProx
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, add_scaled, copy, num_bytes, subtract
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, take, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"server_momentum": 0.7, "proximal_weight": 0.5},
    "samples": {"server_momentum": 0.4, "proximal_weight": 2.0, "aggregation": "samples"},
}


def logits_of(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    logits: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return logits


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_acg_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedACG(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    momentum = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
    for round, cohort in enumerate(COHORTS):
        ahead = {key: leaf + method.server_momentum * momentum[key] for key, leaf in model.items()}
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        change: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in ahead.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                apart = torch.stack([(leaf - ahead[key]).square().sum() for key, leaf in leaves.items()]).sum()
                loss = F.cross_entropy(logits_of(leaves, part.x[index]), part.y[index])
                (loss + method.proximal_weight / 2 * apart).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for key, leaf in leaves.items():
                change[key] += sizes[k] / sum(sizes.values()) * (leaf.detach() - ahead[key])
        momentum = {key: method.server_momentum * leaf + change[key] for key, leaf in momentum.items()}
        model = {key: leaf + momentum[key] for key, leaf in model.items()}
        server = toy.step(cohort)
        assert_close(server["model"], model, 1e-12)
        assert_close(server["momentum"], momentum, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_acg_2_without_momentum_it_is_fedprox_and_without_both_fedavg(make: Any, aggregation: Any) -> None:
    for weight, other in ((0.5, FedProx(proximal_weight=0.5, aggregation=aggregation)), (0.0, FedAvg())):
        other = other.model_copy(update={"aggregation": aggregation})
        ours = toy_of(FedACG(server_momentum=0, proximal_weight=weight, aggregation=aggregation), task=make())
        theirs = toy_of(other, task=make())
        for cohort in COHORTS:
            assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


def test_inv_acg_3_a_round_of_one_plain_step_is_nesterovs() -> None:
    """Of its two forms, that whose gradients are at the point ahead; FedAvgM has the other one, without a point."""
    train = TRAIN.model_copy(update={"batch_size": 12, "local_epochs": 1, "momentum": 0.0, "weight_decay": 0.0})
    toy = toy_of(FedACG(server_momentum=0.6, aggregation="samples"), train, two_layers())
    model = initial(toy)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.6, nesterov=True)
    everyone = [toy.dataset.load(k)["train"] for k in range(len(SIZES))]
    x, y = torch.cat([part.x for part in everyone]), torch.cat([part.y for part in everyone])
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(logits_of(leaves, x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        server = toy.step([0, 1, 2, 3])
        # PyTorch keeps the point ahead in place of the model
        ahead = add_scaled(server["model"], server["momentum"], 0.6)
        assert_close(ahead, {name: leaf.detach() for name, leaf in leaves.items()}, 1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("aggregation", ["samples", "population"])
def test_inv_acg_4_the_momentum_is_how_the_model_moved_and_first_rounds_are_those_of_fedavgm(
    mode: str, aggregation: Any
) -> None:
    methods = FedACG(proximal_weight=0, aggregation=aggregation), FedAvgM(server_momentum=0.85, aggregation=aggregation)
    ours, theirs = (toy_of(method, mode=mode) for method in methods)
    for round, cohort in enumerate(COHORTS):
        before = copy(ours.server["model"])
        server, other = ours.step(cohort), theirs.step(cohort)
        names = ours.task.network.parameter_names
        assert set(server["momentum"]) == set(names)
        assert_equal(server["momentum"], subtract(take(server["model"], names), take(before, names)))
        if round == 0:
            assert_equal(server["model"], other["model"])
        else:
            assert (server["model"]["inner.weight"] - other["model"]["inner.weight"]).abs().max() > 1e-4


def test_only_one_model_travels_and_clients_keep_nothing() -> None:
    toy = toy_of(FedACG(), task=two_layers())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, optimizer: Any) -> None:
    train = TRAIN.model_validate({**TRAIN.model_dump(), **optimizer})
    method = FedACG(proximal_weight=0.3)
    looped, stacked = (toy_of(method, train, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
