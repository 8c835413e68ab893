"""FedIIR: an oracle in plain PyTorch, federated averaging, one client alone, messages, the penalty, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fediir import FedIIR
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, labelled, partly_fixed, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")


def mlp(model: Tree, x: Tensor) -> Tensor:
    """Logits of two_layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden @ model["head.weight"].T + model["head.bias"]


@pytest.mark.parametrize("aggregation", ["uniform", "samples", "population"])
def test_inv_iir_1_rounds_are_those_of_an_oracle_in_plain_pytorch(aggregation: Any) -> None:
    toy = toy_of(FedIIR(aggregation=aggregation, penalty_weight=0.6, momentum=0.7), task=two_layers())
    streams, model = toy.context.streams, initial(toy)
    mean = {name: torch.zeros_like(model[name]) for name in HEAD}
    for round, cohort in enumerate(([0, 2], [1, 2, 3], [0, 1], [3])):
        parts = {client: toy.dataset.load(client)["train"] for client in cohort}
        found = {name: torch.zeros_like(model[name]) for name in HEAD}
        for part in parts.values():
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            F.cross_entropy(mlp(leaves, part.x), part.y, reduction="sum").backward()
            for name in HEAD:
                found[name] += leaves[name].grad
        total = sum(len(part.y) for part in parts.values())
        mean = {name: 0.7 * mean[name] + 0.3 * found[name] / total for name in HEAD}
        trained: dict[int, Tree] = {}
        for client, part in parts.items():
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            n = len(part.y)
            for index in plan_batches(n, 4, 2 * -(-n // 4), streams.generator("batches", round, client)).batches(CPU):
                optimizer.zero_grad()
                loss = F.cross_entropy(mlp(leaves, part.x[index]), part.y[index])
                slopes = torch.autograd.grad(loss, [leaves[name] for name in HEAD], create_graph=True)
                apart = sum((slope - mean[name]).pow(2).sum() for name, slope in zip(HEAD, slopes, strict=True))
                (loss + 0.6 * apart).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained[client] = {name: leaf.detach() for name, leaf in leaves.items()}
        over = {"uniform": len(cohort), "samples": total, "population": sum(SIZES)}[aggregation]
        shares = {k: (1 if aggregation == "uniform" else len(parts[k].y)) / over for k in cohort}
        rest = 1 - sum(shares.values())
        model = {name: sum(shares[k] * trained[k][name] for k in cohort) + rest * leaf for name, leaf in model.items()}
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)
        assert_close(toy.server["gradient"], mean, 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_iir_2_without_penalty_it_is_federated_averaging_to_the_bit(make: Any) -> None:
    ours = toy_of(FedIIR(penalty_weight=0), task=make())
    theirs = toy_of(FedAvg(aggregation="uniform"), task=make())
    for cohort in COHORTS:
        ours.step(cohort)
        theirs.step(cohort)
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_equal(ours.server["model"], theirs.server["model"])


def test_inv_iir_3_a_step_on_all_samples_of_one_client_is_that_of_federated_averaging() -> None:
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1, "clients_per_round": 1})
    ours, theirs = (
        Toy(algorithm, random_clients((9,)), two_layers(), train)
        for algorithm in (FedIIR(penalty_weight=5.0, momentum=0), FedAvg(aggregation="uniform"))
    )
    for _ in range(3):
        ours.step([0])
        theirs.step([0])
    assert_close(ours.server["model"], theirs.server["model"], 1e-12)


def test_inv_iir_4_a_gradient_of_the_last_layer_travels_each_way_beside_the_model_and_clients_keep_nothing() -> None:
    toy = toy_of(FedIIR(penalty_weight=0.1), task=two_layers())
    model = initial(toy)
    size = num_bytes(model) + num_bytes({name: model[name] for name in HEAD})
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def spread(toy: Toy) -> float:
    """Mean squared distance of the clients' gradients of the last layer at the shared model to their mean."""
    slopes = []
    for client in range(4):
        part = toy.dataset.load(client)["train"]
        model = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
        loss = F.cross_entropy(mlp(model, part.x), part.y)
        slopes.append(torch.cat([one.flatten() for one in torch.autograd.grad(loss, [model[name] for name in HEAD])]))
    found = torch.stack(slopes)
    return float((found - found.mean(0)).square().sum(1).mean())


@pytest.mark.slow
def test_inv_iir_5_the_penalty_draws_gradients_of_clients_together() -> None:
    train = TrainConfig(rounds=40, clients_per_round=4, local_epochs=1, batch_size=10, lr=0.2)
    found = []
    for weight in (0.0, 0.5):
        algorithm = FedIIR(penalty_weight=weight, momentum=0)
        toy = Toy(algorithm, random_clients((30, 30, 30, 30)), two_layers(), train)
        for _ in range(40):
            toy.step([0, 1, 2, 3])
        found.append(spread(toy))
    assert found[1] < 0.7 * found[0], found


def test_a_client_left_out_between_both_passes_leaves_no_trace_in_the_next_round() -> None:
    toy = toy_of(FedIIR(penalty_weight=0.1), task=two_layers())
    toy.federation.begin_round(0)
    toy.federation.mean(toy.algorithm.report, [0, 1], {"model": toy.server["model"]})
    other = toy_of(FedIIR(penalty_weight=0.1), task=two_layers())
    assert_equal(toy.step([0, 2]), other.step([0, 2]))


def test_a_last_layer_that_nobody_trains_is_refused() -> None:
    task = partly_fixed("head.weight")
    toy = toy_of(FedIIR(), task=two_layers())
    with pytest.raises(ConfigError, match=r"FedIIR needs the last layer's weight to be trained"):
        FedIIR().check(task, toy.context)


def test_a_bias_that_nobody_trains_has_no_gradient_that_counts() -> None:
    dataset = random_clients(SIZES, dtype=torch.float32)
    toy = Toy(FedIIR(penalty_weight=0.1), dataset, partly_fixed("head.bias"), TRAIN)
    for cohort in COHORTS:
        toy.step(cohort)
    assert set(toy.server["gradient"]) == {"head.weight"}
    assert all(leaf.isfinite().all() for leaf in toy.server["model"].values())


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_one_sample_and_one_class_give_finite_values(make: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1})
    toy = Toy(FedIIR(penalty_weight=0.5), labelled([0], [1, 1, 1], [2, 0]), make(), train, mode=mode)
    for cohort in ([0, 1, 2], [0], [1, 2]):
        toy.step(cohort)
    for tree in toy.server.values():
        assert all(leaf.isfinite().all() for leaf in tree.values())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (
        toy_of(FedIIR(penalty_weight=0.5), train, make(), mode=mode) for mode in ("looped", "vectorized")
    )
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
    assert "failed together" not in caplog.text
