"""FedRS: limits that are federated averaging, factors and slopes by hand, missing classes, whole rounds by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedrs import FedRS
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.partial_toys import labelled
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SKEWED = labelled([0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 9 + [1], [0, 1, 2, 2, 2, 1, 1])
"""Clients of unequal sizes; the second and the third lack a class."""


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


@MODES
@pytest.mark.parametrize("scaling", ["missing", "counts"])
def test_inv_rs_1_with_alpha_1_it_is_fedavg(mode: str, scaling: Any) -> None:
    restricted, plain = (toy_of(a, mode=mode) for a in (FedRS(alpha=1, scaling=scaling), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(restricted.step(), plain.step())


@MODES
def test_inv_rs_2_where_clients_have_all_classes_it_is_fedavg(mode: str) -> None:
    data = labelled([0, 1, 2, 0, 0], [2, 1, 0, 1] * 2, [1, 2, 0], [0, 0, 0, 0, 2, 1])
    restricted, plain = (toy_of(a, mode=mode, dataset=data) for a in (FedRS(alpha=0.1), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_close(restricted.step(), plain.step(), 1e-12)


@MODES
def test_inv_rs_3_with_equally_many_samples_of_every_class_both_scalings_are_fedavg(mode: str) -> None:
    data = labelled([0, 1, 2] * 3, [2, 1, 0] * 4, [1, 2, 0], [0, 0, 1, 1, 2, 2])
    restricted, plain = (toy_of(a, mode=mode, dataset=data) for a in (FedRS(alpha=0.0, scaling="counts"), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_close(restricted.step(), plain.step(), 1e-12)


def test_inv_rs_4_factors_are_those_of_the_paper_and_of_the_official_code() -> None:
    counts = torch.tensor([16, 1, 0, 4], dtype=torch.float64)
    assert FedRS(alpha=0.3).factors(counts).tolist() == [1, 1, 0.3, 1]
    assert FedRS(alpha=0).factors(counts).tolist() == [1, 1, 0, 1]
    expected = [1, 0.3 + 0.7 / 16, 0.3, 0.3 + 0.7 / 4]
    assert FedRS(alpha=0.3, scaling="counts").factors(counts).tolist() == pytest.approx(expected, rel=1e-15)


def test_inv_rs_5_with_alpha_0_the_weights_of_a_missing_class_stay() -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    toy, plain = (toy_of(a, train) for a in (FedRS(alpha=0), FedAvg()))
    before = copy(toy.server["model"])
    after, other = toy.step([2])["model"], plain.step([2])["model"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(after[name][2], before[name][2])
        assert (other[name][2] - before[name][2]).abs().max() > 1e-3
    assert (after["head.weight"][:2] - before["head.weight"][:2]).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_inv_rs_6_the_push_on_a_missing_class_is_alpha_times_its_probability(alpha: float) -> None:
    """A step of plain SGD on all samples of the third client, which lacks class 2."""
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=1, lr=0.3)
    toy = toy_of(FedRS(alpha=alpha), train)
    part, model = SKEWED.load(2)["train"], {name: leaf.numpy() for name, leaf in toy.server["model"].items()}
    f = np.maximum(part.x.numpy() @ model["inner.weight"].T + model["inner.bias"], 0)
    z = (f @ model["head.weight"].T + model["head.bias"]) * np.array([1, 1, alpha])
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    moved = toy.step([2])["model"]["head.weight"][2].numpy() - model["head.weight"][2]
    np.testing.assert_allclose(moved, -0.3 * alpha * (p[:, 2:] * f).mean(0), atol=1e-14)


def test_predictions_are_those_of_the_plain_logits() -> None:
    toy = toy_of(FedRS(alpha=0.2))
    model = toy.step([1, 2])["model"]
    for client, rows in toy.scores().items():
        part = SKEWED.load(client)["test"]
        expected = F.cross_entropy(toy.task.network.logits(model, part.x), part.y)
        assert abs(rows["global"].loss - float(expected)) < 1e-12


def test_padding_contributes_nothing() -> None:
    part, task = SKEWED.load(0)["train"], two_layers()
    model, frozen = task.network.initialize(0), {"factors": torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64)}
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    padded, cut = Batch(part.x, part.y, mask), Batch(part.x[:4], part.y[:4])
    values = [FedRS().objective(model, batch, task, frozen, None) for batch in (padded, cut)]
    assert_close(values[0], values[1], 1e-14)


OPTIMIZERS: list[dict[str, Any]] = [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@MODES
@pytest.mark.parametrize("scaling", ["missing", "counts"])
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=["momentum", "adam"])
def test_rounds_are_those_of_plain_pytorch(changes: dict[str, Any], scaling: Any, mode: str) -> None:
    """Mini-batches, with unequal clients, partial participation, and classes that clients lack."""
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "momentum": 0.0, "weight_decay": 0.0, **changes})
    toy = toy_of(FedRS(alpha=0.4, scaling=scaling), train, mode=mode)
    expected = copy(toy.server["model"])
    for round, cohort in enumerate(([0, 2], [1, 2, 3], [0, 1])):
        plans = {k: plan_of(toy, round, k) for k in cohort}
        expected = by_hand(expected, plans, scaling, train)
        assert_close(toy.step(cohort)["model"], expected, 1e-12)


def plan_of(toy: Toy, round: int, client: int) -> list[Batch]:
    """The mini-batches of a client's local update."""
    part = toy.dataset.load(client)["train"]
    plan = plan_batches(len(part), 4, 2 * -(-len(part) // 4), toy.context.streams.generator("batches", round, client))
    return [Batch(part.x[index], part.y[index]) for index in plan.batches(CPU)]


def by_hand(server: Tree, plans: dict[int, list[Batch]], scaling: str, train: TrainConfig) -> Tree:
    """A round with alpha = 0.4, from equation and code."""
    labels = {k: SKEWED.load(k)["train"].y for k in plans}
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for client, batches in plans.items():
        w = {name: leaf.clone().requires_grad_() for name, leaf in server.items()}
        if train.optimizer == "sgd":
            rule: Any = torch.optim.SGD(w.values(), train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
        else:
            rule = torch.optim.Adam(w.values(), train.lr)
        n = [int((labels[client] == c).sum()) for c in range(3)]
        if scaling == "missing":
            alpha = [1.0 if count else 0.4 for count in n]
        else:
            alpha = [0.4 + 0.6 * count / max(n) for count in n]
        for batch in batches:
            z = torch.relu(batch.x @ w["inner.weight"].T + w["inner.bias"]) @ w["head.weight"].T + w["head.bias"]
            powers = torch.stack([(alpha[c] * z[:, c]).exp() for c in range(3)], 1)
            own = powers[torch.arange(len(batch.y)), batch.y]
            rule.zero_grad()
            (-(own / powers.sum(1)).log()).mean().backward()  # type: ignore[no-untyped-call]
            rule.step()
        for name, leaf in w.items():
            mean[name] += leaf.detach() * (len(labels[client]) / sum(len(y) for y in labels.values()))
    return mean


@pytest.mark.parametrize("scaling", ["missing", "counts"])
def test_vectorized_agrees_with_looped_on_ragged_mini_batches(scaling: Any) -> None:
    looped, stacked = (toy_of(FedRS(scaling=scaling), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-12)


def test_the_smaller_alpha_the_less_the_weights_of_a_missing_class_move() -> None:
    moved = []
    for method in (FedAvg(), FedRS(alpha=0.8), FedRS(alpha=0.5), FedRS(alpha=0.1)):
        toy = toy_of(method, TRAIN.model_copy(update={"weight_decay": 0.0}))
        before = toy.server["model"]["head.weight"][2]
        moved.append(float((toy.step([2])["model"]["head.weight"][2] - before).norm()))
    assert moved == sorted(moved, reverse=True) and moved[0] > 5 * moved[-1], moved
