"""Floating-point operations of local steps: the counter says what can be counted by hand, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from rayfl.engine.steps import flops as module
from rayfl.engine.updates.settings import TrainConfig
from rayfl.models.base import ClassificationModel, Network
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_equal, random_clients

SIZES = (7, 4, 10)
TRAIN = TrainConfig(rounds=2, clients_per_round="all", local_epochs=3, batch_size=3, lr=0.1, momentum=0.5)


def toy_of(algorithm: Any, counted: bool = True, **options: Any) -> Toy:
    settings: dict[str, Any] = {"dataset": random_clients(SIZES), "task": softmax_regression(), **options}
    toy = Toy(algorithm, train=TRAIN, **settings)
    for host in toy.client_hosts if counted else ():
        host.engine.count_flops()
    return toy


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_of_a_linear_layer_there_are_two_products_a_sample(mode: str, hosts: int) -> None:
    toy = toy_of(FedAvg(), mode=mode, hosts=hosts)
    for _ in range(2):
        toy.step()
        # outputs, and the gradient of the weight: 5 inputs by 3 classes, a multiplication and an addition each
        assert toy.federation.costs.flops == TRAIN.local_epochs * sum(SIZES) * 2 * (2 * 5 * 3)


def test_of_two_layers_there_are_five() -> None:
    toy = toy_of(FedAvg(), task=two_layers())
    toy.step()
    a_sample = 2 * (2 * 5 * 7 + 3 * 7 * 3)  # the gradient of what the second layer reads, too
    assert toy.federation.costs.flops == TRAIN.local_epochs * sum(SIZES) * a_sample


class EachToken(ClassificationModel):
    """A linear layer over every token of a text, and one over their mean."""

    padding = 0

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 6), nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.inner(self.embedding(x)).mean(1)  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_of_texts_each_step_counts_the_columns_that_it_has(mode: str) -> None:
    lengths = [2, 2, 8, 2, 8]  # one mini-batch each
    x = (torch.arange(16) < torch.tensor(lengths)[:, None]).long()
    train = TRAIN.model_copy(update={"batch_size": 1, "local_epochs": 1, "momentum": 0.0})
    task = Classification(Network(EachToken))
    toy = Toy(FedAvg(), ListDataset([(x, torch.zeros(5, dtype=torch.int64))]), task, train, mode=mode)
    toy.client_hosts[0].engine.count_flops()
    toy.step()
    # forward, and both gradients, of the layer over tokens and of the head
    assert toy.federation.costs.flops == 3 * (sum(lengths) * 2 * 4 * 6 + len(lengths) * 2 * 6 * 3)


def test_counting_changes_no_bit_also_with_dropout_and_kept_momentum() -> None:
    found = []
    for counted in (True, False):
        toy = Toy(
            Ditto(),
            random_clients((6, 9)),
            normalized_layers(dropout=0.5),
            TRAIN.model_copy(update={"persist_optimizer": True}),
        )
        for host in toy.client_hosts if counted else ():
            host.engine.count_flops()
        torch.manual_seed(3)
        toy.run()
        found.append((toy.server, toy.states(), torch.rand(1)))
        assert (toy.federation.costs.flops is not None) == counted
    assert_equal(found[0][0], found[1][0])
    assert_equal({str(k): state for k, state in found[0][1].items()}, {str(k): s for k, s in found[1][1].items()})
    assert torch.equal(found[0][2], found[1][2])


def test_a_step_of_each_shape_is_done_once_more_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    train = module.looped.train

    def watched(request: Any, task: Any, device: Any) -> Any:
        steps.append(request.plan.steps)
        return train(request, task, device)

    toy = toy_of(FedAvg())
    monkeypatch.setattr(module.looped, "train", watched)
    toy.run()
    extra = len(steps) - 2 * len(SIZES)
    assert steps.count(1) == extra == 2, "batches of three, and of one: 7, 4 and 10 samples leave one"


def test_what_cannot_be_counted_is_said_once_and_is_no_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(**_: Any) -> Any:
        raise RuntimeError("no operation of this kind is known")

    monkeypatch.setattr("torch.utils.flop_counter.FlopCounterMode", fails)
    toy, plain = toy_of(FedAvg()), toy_of(FedAvg(), counted=False)
    toy.run()
    plain.run()
    assert toy.federation.costs.flops is None
    assert_equal(toy.server, plain.server)
    assert [r.message for r in caplog.records if "tracking.flops" in r.message] == [
        "floating-point operations are not counted (tracking.flops): no operation of this kind is known"
    ]
