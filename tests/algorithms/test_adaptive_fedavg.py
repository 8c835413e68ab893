"""Adaptive-FedAvg: rounds of an oracle in plain PyTorch, factors by hand, limits that are federated averaging."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.adaptive_fedavg import AdaptiveFedAvg
from algorithms.fedavg import FedAvg
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 2], [1, 2, 3], [0, 1], [1, 2], [0, 2, 3], [1, 3])
TRAIN = TrainConfig(
    rounds=6, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "time": {"decay": "time", "mean_decay": 0.5, "variance_decay": 0.5, "ratio_decay": 0.5},
    "no memory": {"mean_decay": 0, "variance_decay": 0, "ratio_decay": 0, "aggregation": "uniform"},
}


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def trained(toy: Toy, model: Tree, client: int, round: int, lr: float) -> Tree:
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=lr, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(SIZES[client], 4, 2 * -(-SIZES[client] // 4), generator).batches(CPU):
        optimizer.zero_grad()
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
        F.cross_entropy(logits, part.y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def average(values: Sequence[Any], beta: float) -> Any:
    """What an exponential average without bias is: a mean whose weights fall by beta with age."""
    weights = [beta ** (len(values) - 1 - place) for place in range(len(values))]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


class Plain:
    """The factor from all models so far, by means whose weights fall."""

    def __init__(self, method: AdaptiveFedAvg) -> None:
        self.method = method
        self.models: list[torch.Tensor] = []
        self.squares: list[float] = []
        self.ratios: list[float] = []

    def factor(self, model: torch.Tensor) -> float:
        method = self.method
        before = average(self.models, method.mean_decay) if self.models else 0
        self.models.append(model)
        last: float = average(self.squares, method.variance_decay) if self.squares else 0.0
        self.squares.append(float((model - before).square().mean()))
        now: float = average(self.squares, method.variance_decay)
        self.ratios.append(now / last if len(self.models) > 2 and last > 0 else 1.0)
        found: float = average(self.ratios, method.ratio_decay)
        return min(1.0, found / len(self.models) if method.decay == "time" else found)


def flat(model: Tree) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_ada_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = AdaptiveFedAvg(**SETTINGS[name])
    toy = toy_of(method)
    oracle, model, factor, factors = Plain(method), toy.server["model"], 1.0, []
    for round, cohort in enumerate(COHORTS):
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        found = {k: trained(toy, model, k, round, 0.1 * 0.9**round * factor) for k in cohort}
        model = {key: sum(sizes[k] * found[k][key] for k in cohort) / sum(sizes.values()) for key in model}
        factor = oracle.factor(flat(model))
        server = toy.step(cohort)
        assert_close(server["model"], model, 1e-12)
        assert_close(server["factor"], factor, 1e-12)
        factors.append(factor)
    assert min(factors) < 0.9
    assert (method.decay == "time") != any(later > earlier for earlier, later in pairwise(factors))


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_ada_2_a_round_is_federated_averaging_at_a_part_of_the_rate_to_the_bit(policy: Any, make: Any) -> None:
    """The first two rounds at the whole rate."""
    ours, factors = toy_of(AdaptiveFedAvg(aggregation=policy, decay="time"), task=make()), []
    for round, cohort in enumerate(COHORTS[:4]):
        factors.append(ours.server["factor"])
        lr = TRAIN.lr_in(round) * factors[-1]
        plain = toy_of(FedAvg(aggregation=policy), TRAIN.model_copy(update={"lr": lr, "lr_decay": 1.0}), make())
        plain.round, plain.server = ours.round, {"model": copy(ours.server["model"])}
        assert_equal(ours.step(cohort)["model"], plain.step(cohort)["model"])
    assert factors[:2] == [1, 1]
    assert max(factors[2:]) < 0.6


def path(method: AdaptiveFedAvg, points: Sequence[float]) -> list[float]:
    """The factors after models of one parameter."""
    moments: Tree = {"mean": {"theta": torch.zeros(1, dtype=torch.float64)}, "variance": 0.0, "ratio": 0.0, "steps": 0}
    found = []
    for point in points:
        moments = method.followed({"theta": torch.tensor([point], dtype=torch.float64)}, moments)
        found.append(method.factor(moments))
    return found


def test_inv_ada_3_without_memory_it_is_the_square_of_how_steps_shrink() -> None:
    method = AdaptiveFedAvg(mean_decay=0, variance_decay=0, ratio_decay=0)
    assert path(method, [5, 9, 7, 8, 11, 11]) == pytest.approx([1, 1, 4 / 16, 1 / 4, 1, 0])
    timed = AdaptiveFedAvg(mean_decay=0, variance_decay=0, ratio_decay=0, decay="time")
    assert path(timed, [5, 9, 7, 8, 11, 11]) == pytest.approx([1, 1 / 2, 4 / 16 / 3, 1 / 4 / 4, 1, 0])
    halving = [1 - 0.5**n for n in range(12)]
    assert path(method, halving)[3:] == pytest.approx([0.25] * 9)


def test_inv_ada_4_a_model_that_stands_still_changes_nothing() -> None:
    method = AdaptiveFedAvg(mean_decay=0, variance_decay=0)
    assert path(method, [0.0] * 6) == pytest.approx([1] * 6)
    # the squares 4, 4, 0, 0, 0 have the ratio 0 once, and afterwards there is nothing to compare with
    weights = [0.7**age for age in range(5)]
    assert path(method, [2, 4, 4, 4, 4])[-1] == pytest.approx(1 - weights[2] / sum(weights))


def test_inv_ada_5_a_drift_raises_the_factor_and_nothing_above_the_whole_rate() -> None:
    settling = [3 + 0.7**n for n in range(20)]
    found = path(AdaptiveFedAvg(), [*settling, *(one - 2 for one in settling)])
    assert max(found[5:20]) < 0.7
    assert found[20] == 1
    assert max(found) <= 1 + 1e-12 and min(found) > 0


def test_one_number_more_travels_down_and_nobody_keeps_anything() -> None:
    toy = toy_of(AdaptiveFedAvg())
    size = num_bytes(toy.server["model"])
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size + 8, size))
    assert not any(toy.states().values())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped(optimizer: Any) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (toy_of(AdaptiveFedAvg(), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS[:5]:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
