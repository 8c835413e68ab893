"""q-FedAvg: an oracle in plain PyTorch, federated averaging, the largest loss, lengths of steps, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.qfedavg import ADDED, QFedAvg, loss_weights
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import RayflError
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.params import copy
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.8
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), **{"train": TRAIN, **options})


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("q", "constant"), [(1.0, None), (0.3, 2.0), (6.0, 0.5)])
def test_inv_q_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any, q: float, constant: Any) -> None:
    """Algorithm 2 as it is written: changes scaled by L, and one sum of them over one of the h_k."""
    toy = toy_of(QFedAvg(fairness=q, lipschitz=constant, aggregation=weights))
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(network.head_inputs_and_logits(model, x)[1], y)

    for round, cohort in enumerate(COHORTS):
        rate = 0.1 * 0.8**round
        lipschitz = constant or 1 / rate
        above, below = {name: torch.zeros_like(leaf) for name, leaf in w.items()}, 0.0
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            share = 1 if weights == "uniform" else len(part.y)
            value = float(loss(w, part.x, part.y)) + ADDED
            model = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            optimizer = torch.optim.SGD(model.values(), lr=rate, momentum=0.5, weight_decay=0.01)
            steps = 2 * -(-len(part.y) // 4)
            for index in plan_batches(len(part.y), 4, steps, streams.generator("batches", round, client)).batches(CPU):
                optimizer.zero_grad()
                loss(model, part.x[index], part.y[index]).backward()
                optimizer.step()
            change = {name: lipschitz * (w[name] - model[name].detach()) for name in w}
            length = sum(float(leaf.square().sum()) for leaf in change.values())
            for name, leaf in change.items():
                above[name] += share * value**q * leaf
            below += share * (q * value ** (q - 1) * length + lipschitz * value**q)
        w = {name: leaf - above[name] / below for name, leaf in w.items()}
        assert_close(toy.step(cohort)["model"], w, 1e-12)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_q_2_without_fairness_it_is_federated_averaging(make: Any, weights: Any) -> None:
    fair = toy_of(QFedAvg(fairness=0, aggregation=weights, finetune_epochs=1), make())
    plain = toy_of(FedAvg(aggregation=weights, finetune_epochs=1), make())
    for cohort in COHORTS:
        assert_equal(fair.step(cohort), plain.step(cohort))
    mine, theirs = fair.scores(final=True), plain.scores(final=True)
    assert all((mine[k][row].vector == theirs[k][row].vector).all() for k in mine for row in ("global", "finetuned"))
    assert fair.federation.traffic.by_client == plain.federation.traffic.by_client


def test_inv_q_3_as_q_vanishes_it_becomes_federated_averaging() -> None:
    near, plain = toy_of(QFedAvg(fairness=1e-14)), toy_of(FedAvg(aggregation="uniform"))
    for cohort in COHORTS:
        assert_close(near.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_q_4_with_a_small_constant_it_is_a_mean_weighted_by_losses(make: Any) -> None:
    """L -> 0 drops the length of the change; buffers are averaged with the same weights whatever L is."""
    q, cohort = 2.0, [0, 1, 3]
    for constant in (1e-15, 30.0):
        toy = toy_of(QFedAvg(fairness=q, lipschitz=constant), make())
        w, network = copy(toy.server["model"]), toy.task.network
        losses = [toy.scores(split="train")[client]["global"].loss for client in cohort]
        trained = []
        for client in cohort:
            alone = toy_of(FedAvg(), make())
            trained.append(alone.step([client])["model"])
        shares = np.array(losses) ** q / (np.array(losses) ** q).sum()
        mean = {name: sum(share * model[name] for share, model in zip(shares, trained, strict=True)) for name in w}
        found = toy.step(cohort)["model"]
        exact = network.buffer_names if constant > 1 else tuple(w)
        for name in exact:
            assert_close(found[name], mean[name], 1e-8, name)  # the losses have ADDED


def test_inv_q_5_a_large_q_follows_the_client_with_the_largest_loss() -> None:
    toy, cohort = toy_of(QFedAvg(fairness=400, lipschitz=1e-15)), [0, 1, 3]
    losses = {client: toy.scores(split="train")[client]["global"].loss for client in cohort}
    worst = max(losses, key=losses.__getitem__)
    assert all((loss / losses[worst]) ** 400 < 1e-12 for client, loss in losses.items() if client != worst)
    assert_close(toy.step(cohort)["model"], toy_of(FedAvg()).step([worst])["model"], 1e-10)


def test_inv_q_6_weights_are_powers_in_units_of_the_largest() -> None:
    assert_close(torch.from_numpy(loss_weights([2.0, 1.0, 4.0], 3)), torch.tensor([8, 1, 64]).double() / 64, 1e-15)
    assert loss_weights([1e-10, 1e300], 50).tolist() == [2.0**-52, 1.0]
    assert loss_weights([1e-10, 1e-10], 50).tolist() == [1.0, 1.0]


def test_losses_of_zero_are_no_tiny_weights() -> None:
    """A model that is sure of every label, and right: 1e-10 to the power of 20 is no weight that a mean may have."""
    data, train = random_clients(SIZES), TRAIN.model_copy(update={"weight_decay": 0.0})
    toy = toy_of(QFedAvg(fairness=20))
    head, rest = toy.task.network.head_names, toy.server["model"]
    sure = {name: leaf * 1e6 if name in head else leaf for name, leaf in rest.items()}
    parts = [data.load(client)["train"].x for client in range(len(SIZES))]
    right = [(x, toy.task.network.head_inputs_and_logits(sure, x)[1].argmax(1)) for x in parts]
    toy = Toy(QFedAvg(fairness=20), ListDataset(right), two_layers(), train)
    toy.server = {"model": sure}
    assert_close(toy.step([0, 1, 3])["model"], sure, 1e-6)


def test_a_round_without_a_rate_moves_nothing() -> None:
    toy = toy_of(QFedAvg(fairness=2), train=TRAIN.model_copy(update={"lr": 0.0}))
    before = copy(toy.server["model"])
    assert_equal(toy.step([0, 1])["model"], before)


class Below(ClassificationMeasures):
    """Measures of classification with a loss that is negative."""

    def statistics(self, rows: Tensor, y: Tensor) -> Tensor:
        found = super().statistics(rows, y)
        found[1] = -1 - found[1]  # the sum of the losses
        return found


class Negative(Classification):
    """A task scored by these measures."""

    measures = Below()  # type: ignore[assignment]


def test_a_negative_loss_is_refused() -> None:
    task = Negative(two_layers().network)
    with pytest.raises(RayflError, match=r"q-FedAvg takes powers of losses, but that of client 0 is -"):
        toy_of(QFedAvg(), task).step([0, 1])


@pytest.mark.parametrize(
    ("options", "train", "said"),
    [
        ({}, {}, True),
        ({}, {"momentum": 0.0}, False),
        ({}, {"momentum": 0.0, "optimizer": "adam"}, True),
        ({"lipschitz": 2.0}, {}, False),
        ({"fairness": 0.0}, {}, False),
    ],
)
def test_a_constant_that_is_no_inverse_step_is_named(options: Any, train: Any, said: bool) -> None:
    context = RoundContext(0, 3, 4, TRAIN.model_copy(update=train), RandomStreams(0))
    assert [("algorithm.lipschitz is 1/train.lr" in one) for one in QFedAvg(**options).remarks(context)] == [
        True
    ] * said


def test_traffic_is_that_of_federated_averaging_and_three_numbers() -> None:
    toy = toy_of(QFedAvg())
    size = 8 * toy.task.network.num_parameters
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == {0: (size + 16, size + 8), 2: (size + 16, size + 8)}


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_looped_and_stacked_clients_agree(make: Any) -> None:
    looped, stacked = (toy_of(QFedAvg(fairness=2), make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 3], [1, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
