"""FedLC: limits that are federated averaging, the calibrated loss by hand, absent classes, whole rounds by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedlc import EXCLUDED, FedLC
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def labelled(*labels: list[int], classes: int = 3) -> ListDataset:
    """Clients with Gaussian inputs and these labels."""
    generator = torch.Generator().manual_seed(5)
    return ListDataset(
        [(torch.randn(len(y), 5, generator=generator, dtype=torch.float64), torch.tensor(y)) for y in labels], classes
    )


SKEWED = labelled([0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 9 + [1], [0, 1, 2, 2, 2, 1, 1])
"""Clients of unequal sizes; the second and the third lack a class."""


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


@MODES
def test_inv_lc_1_without_calibration_it_is_fedavg(mode: str) -> None:
    calibrated, plain = (toy_of(a, mode=mode, dataset=SKEWED) for a in (FedLC(calibration_weight=0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(calibrated.step(), plain.step())


@MODES
def test_inv_lc_2_with_equally_many_samples_of_every_class_it_is_fedavg(mode: str) -> None:
    data = labelled([0, 1, 2] * 3, [2, 1, 0] * 4, [1, 2, 0], [0, 0, 1, 1, 2, 2])
    calibrated, plain = (toy_of(a, mode=mode, dataset=data) for a in (FedLC(calibration_weight=7.0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_close(calibrated.step(), plain.step(), 1e-12)


def test_inv_lc_3_the_calibration_is_that_of_the_paper() -> None:
    counts = torch.tensor([16, 1, 0, 81], dtype=torch.float64)
    expected = [0.3 / 2, 0.3, EXCLUDED, 0.1]
    assert FedLC(calibration_weight=0.3).calibration(counts).tolist() == pytest.approx(expected, rel=1e-15)
    assumed = FedLC(calibration_weight=0.3, absent_count=1e-8).calibration(counts).tolist()
    assert assumed == pytest.approx([0.15, 0.3, 30.0, 0.1], rel=1e-15)


def test_inv_lc_4_the_loss_is_the_logistic_one_of_margins_between_pairs_of_classes() -> None:
    task, batch, tau = two_layers(), sample(SKEWED, 3), 0.8
    model = task.network.initialize(1)
    z, counts = task.logits(model, batch).detach().numpy(), np.array([1.0, 3.0, 3.0])
    total = 0.0
    for row, y in zip(z, batch.y.tolist(), strict=True):
        margins = tau * (counts[y] ** -0.25 - counts**-0.25)
        others = [c for c in range(3) if c != y]
        total += float(np.log1p(sum(np.exp(row[c] - row[y] + margins[c]) for c in others)))
    assert abs(float(value(FedLC(calibration_weight=tau), model, batch, counts)) - total / len(z)) < 1e-12


def test_inv_lc_5_a_class_that_a_client_lacks_is_not_pushed_down() -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    toy, plain = (toy_of(a, train, dataset=SKEWED) for a in (FedLC(), FedAvg()))
    before = copy(toy.server["model"])
    after, other = toy.step([2])["model"], plain.step([2])["model"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(after[name][2], before[name][2])
        assert (other[name][2] - before[name][2]).abs().max() > 1e-3
    assert (after["head.weight"][:2] - before["head.weight"][:2]).abs().max() > 1e-3


@MODES
def test_inv_lc_6_a_vanishing_count_is_as_none(mode: str) -> None:
    left_out, tiny = (toy_of(FedLC(absent_count=n), mode=mode, dataset=SKEWED) for n in (0.0, 1e-8))
    for _ in range(TRAIN.rounds):
        assert_close(left_out.step(), tiny.step(), 1e-12)
    # a class that is taken to have a sample is pushed down
    assumed = toy_of(FedLC(absent_count=1.0), mode=mode, dataset=SKEWED)
    gap = (
        assumed.step([1])["model"]["head.bias"][0] - toy_of(FedLC(), dataset=SKEWED).step([1])["model"]["head.bias"][0]
    )
    assert abs(float(gap)) > 1e-3


@MODES
def test_inv_lc_7_a_client_of_one_class_sends_back_what_it_received(mode: str) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    toy = toy_of(FedLC(), train, dataset=labelled([1] * 5, [0] * 7), mode=mode)
    before = copy(toy.server["model"])
    assert_equal(toy.step([0, 1])["model"], before)


def sample(dataset: ListDataset, client: int) -> Batch:
    part = dataset.load(client)["train"]
    return Batch(part.x, part.y)


def value(method: FedLC, model: Tree, batch: Batch, counts: Any) -> Tensor:
    calibration = method.calibration(torch.as_tensor(counts, dtype=torch.float64))
    return method.objective(model, batch, two_layers(), {"calibration": calibration}, None)


def test_padding_contributes_nothing() -> None:
    batch, model = sample(SKEWED, 0), two_layers().network.initialize(0)
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    padded = value(FedLC(), model, Batch(batch.x, batch.y, mask), [4, 1, 1])
    assert_close(padded, value(FedLC(), model, Batch(batch.x[:4], batch.y[:4]), [4, 1, 1]), 1e-12)


OPTIMIZERS: list[dict[str, Any]] = [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@MODES
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=["momentum", "adam"])
def test_rounds_are_those_of_plain_pytorch(changes: dict[str, Any], mode: str) -> None:
    """Whole mini-batches, with unequal clients, partial participation, and classes that clients lack."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 3, "momentum": 0.0, **changes})
    toy = toy_of(FedLC(calibration_weight=0.7), train, dataset=SKEWED, mode=mode)
    expected = copy(toy.server["model"])
    for cohort in ([0, 2], [1, 2, 3], [0, 1]):
        expected = by_hand(expected, [sample(SKEWED, k) for k in cohort], 0.7, train)
        assert_close(toy.step(cohort)["model"], expected, 1e-12)


def by_hand(server: Tree, clients: list[Batch], tau: float, train: TrainConfig) -> Tree:
    """A round of three local steps."""
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for batch in clients:
        w = {name: leaf.clone().requires_grad_() for name, leaf in server.items()}
        if train.optimizer == "sgd":
            rule: Any = torch.optim.SGD(w.values(), train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
        else:
            rule = torch.optim.Adam(w.values(), train.lr, weight_decay=train.weight_decay)
        n = torch.bincount(batch.y, minlength=3).double()
        for _ in range(3):
            z = torch.relu(batch.x @ w["inner.weight"].T + w["inner.bias"]) @ w["head.weight"].T + w["head.bias"]
            rule.zero_grad()
            F.cross_entropy((z - tau / n**0.25)[:, n > 0], torch.cumsum(n > 0, 0)[batch.y] - 1).backward()  # type: ignore[no-untyped-call]
            rule.step()
        for name, leaf in w.items():
            mean[name] += leaf.detach() * (len(batch.y) / sum(len(one.y) for one in clients))
    return mean


def test_vectorized_agrees_with_looped_on_ragged_mini_batches() -> None:
    looped, stacked = (toy_of(FedLC(), dataset=SKEWED, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-12)


def test_few_samples_of_a_class_move_the_model_more_than_in_fedavg() -> None:
    """The share of the rare class grows where its samples are those of the frequent one."""
    data = ListDataset([(torch.ones(10, 5, dtype=torch.float64), torch.tensor([0] * 9 + [1]))], 3)
    train = TRAIN.model_copy(update={"local_epochs": 30, "batch_size": None, "rounds": 1, "weight_decay": 0.0})
    shares = []
    for method in (FedAvg(), FedLC()):
        toy = toy_of(method, train, dataset=data)
        model = toy.step([0])["model"]
        shares.append(float(toy.task.logits(model, sample(data, 0)).softmax(-1)[0, 1]))
    # of counts 9 and 1 and one input, the logits differ by ln 9 in FedAvg and by ln 9 - (1 - 9^-1/4) in FedLC
    assert shares[1] > 1.2 * shares[0]
