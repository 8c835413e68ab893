"""FedInit: rounds in plain PyTorch, limits that are federated averaging, first participations, what clients keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedinit import FedInit
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients

SETTINGS: dict[str, dict[str, Any]] = {
    "change": {"beta": 0.3},
    "model": {"beta": 0.2, "message": "model", "aggregation": "samples"},
}
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def logits_of(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    logits: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return logits


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_init_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedInit(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    last = {k: dict(model) for k in range(len(SIZES))}
    for round, cohort in enumerate(COHORTS):
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            start = {key: leaf + method.beta * (leaf - last[k][key]) for key, leaf in model.items()}
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in start.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                loss = F.cross_entropy(logits_of(leaves, part.x[index]), part.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            last[k] = {key: leaf.detach() for key, leaf in leaves.items()}
            for key, leaf in last[k].items():
                sent = leaf if method.message == "model" else model[key] + leaf - start[key]
                mean[key] += sizes[k] / sum(sizes.values()) * sent
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        assert all(set(state) <= {"last"} for state in toy.states().values())
        for k, state in toy.states().items():
            if state:
                assert_close(state["last"], last[k], 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_init_2_of_beta_0_it_is_federated_averaging_to_the_bit(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedInit(beta=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])
    assert not any(ours.states().values())


@MODES
def test_inv_init_3_round_0_is_that_of_federated_averaging_and_later_first_ones_are_not(mode: str) -> None:
    ours = toy_of(FedInit(beta=0.5, message="model", aggregation="samples"), mode=mode)
    plain = toy_of(FedAvg(), mode=mode)
    assert_equal(ours.step([0, 1])["model"], plain.step([0, 1])["model"])
    left, right = (toy.step([2, 3])["model"]["inner.weight"] for toy in (ours, plain))
    assert (left - right).abs().max() > 1e-4


@MODES
def test_inv_init_4_both_messages_are_the_same_while_all_take_part_and_count_alike(mode: str) -> None:
    change, model = (toy_of(FedInit(beta=0.4, message=message), mode=mode) for message in ("change", "model"))
    for _ in range(3):
        everyone = range(len(SIZES))
        assert_close(change.step(everyone)["model"], model.step(everyone)["model"], 1e-12)
    assert (change.step([0])["model"]["inner.weight"] - model.step([0])["model"]["inner.weight"]).abs().max() > 1e-5


def test_inv_init_5_clients_that_differ_end_nearer_to_each_other() -> None:
    """On parabolas, whose contraction by a round is known: c = (1 - eta)^steps from the start to the minimum."""
    points, beta, train = (0.0, 4.0), 0.2, TrainConfig(rounds=9, clients_per_round="all", local_epochs=2, lr=0.1)
    toy = Toy(FedInit(beta=beta), quadratic_clients(points, (1, 1)), Quadratic(start=1.0), train)
    contraction, model, last = 0.9**2, 1.0, [1.0, 1.0]
    for _ in range(6):
        starts = [model + beta * (model - one) for one in last]
        last = [point + contraction * (start - point) for point, start in zip(points, starts, strict=True)]
        model = sum(last) / 2
        assert abs(float(toy.step()["model"]["theta"]) - model) < 1e-12
    # d = (1 - c) 4 - c beta d at the end; without beta they end (1 - c) 4 apart
    assert abs(last[1] - last[0] - 4 * (1 - contraction) / (1 + beta * contraction)) < 1e-3


def test_only_a_model_travels() -> None:
    toy = toy_of(FedInit(), task=two_layers())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))


@pytest.mark.parametrize("message", ["change", "model"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, message: Any) -> None:
    method = FedInit(beta=0.3, message=message)
    looped, stacked = (toy_of(method, TRAIN, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
    assert_close(looped.states(), stacked.states(), 1e-9)


def test_what_is_idle() -> None:
    assert len(FedInit(beta=0, message="model").idle_settings()) == 1
