"""FedDecorr: limits that are federated averaging, the penalty by hand, one sample, whole rounds by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.feddecorr import EPSILON, FedDecorr
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
FORMS = pytest.mark.parametrize("form", ["paper", "code"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(rows: int) -> Batch:
    return Batch(torch.zeros(rows, 5), torch.zeros(rows, dtype=torch.int64))


@MODES
@FORMS
def test_inv_dec_1_without_weight_it_is_fedavg(mode: str, form: Any) -> None:
    both = [toy_of(a, mode=mode) for a in (FedDecorr(decorrelation_weight=0, form=form), FedAvg())]
    for _ in range(TRAIN.rounds):
        assert_equal(both[0].step(), both[1].step())


@MODES
@FORMS
def test_inv_dec_2_of_mini_batches_of_one_sample_it_is_fedavg(mode: str, form: Any) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1, "local_epochs": 1})
    methods = FedDecorr(decorrelation_weight=50.0, form=form), FedAvg()
    both = [toy_of(a, train, mode=mode, dataset=random_clients((3, 2, 1))) for a in methods]
    for cohort in ([0, 1, 2], [0, 2]):
        assert_close(both[0].step(cohort), both[1].step(cohort), 1e-12)


@FORMS
@pytest.mark.parametrize(("rows", "columns"), [(9, 4), (4, 9), (6, 6)])
def test_inv_dec_3_the_penalty_is_that_of_numpys_correlations(rows: int, columns: int, form: Any) -> None:
    z = drawn(rows, columns)
    correlations = np.corrcoef(z.numpy().T)
    # what is added to variances is of order 1e-8
    expected = float((correlations**2).mean())
    if form == "code":
        off = correlations[~np.eye(columns, dtype=bool)]
        expected = float((off**2).mean()) * (rows - 1) ** 2 / rows
    assert float(FedDecorr(form=form).penalty(z, plain(rows))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(9, 4), (4, 9)])
def test_inv_dec_4_value_and_gradient_are_those_of_the_matrix_written_out(rows: int, columns: int) -> None:
    z = drawn(rows, columns).requires_grad_()
    found = FedDecorr().penalty(z, plain(rows))
    standardised = (z - z.mean(0)) / (z.var(0, correction=0) + EPSILON).sqrt()
    expected = (standardised.T @ standardised / rows).square().sum() / columns**2
    assert_close(found.detach(), expected.detach(), 1e-14)
    left, right = (torch.autograd.grad(value, z)[0] for value in (found, expected))
    assert_close(left, right, 1e-14)


@FORMS
def test_inv_dec_5_shifts_and_scales_of_features_do_not_matter(form: Any) -> None:
    z, method = drawn(8, 5), FedDecorr(form=form)
    moved = z * torch.tensor([1.0, -2.0, 3.0, 0.5, 7.0]) + torch.arange(5)
    assert float(method.penalty(moved, plain(8))) == pytest.approx(float(method.penalty(z, plain(8))), rel=1e-6)


def test_inv_dec_6_its_bounds_are_those_of_uncorrelated_and_of_equal_features() -> None:
    orthogonal = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    equal = drawn(6, 1).expand(6, 3)
    for form, low in (("paper", 1 / 2), ("code", 0.0)):
        method = FedDecorr(form=form)
        assert float(method.penalty(orthogonal, plain(4))) == pytest.approx(low, abs=1e-7)
        high = 1.0 if form == "paper" else 5**2 / 6
        assert float(method.penalty(equal, plain(6))) == pytest.approx(high, rel=1e-6)


@FORMS
def test_constant_features_have_no_correlation_and_a_finite_gradient(form: Any) -> None:
    z = torch.cat([drawn(6, 2), torch.zeros(6, 2, dtype=torch.float64)], 1).requires_grad_()
    value = FedDecorr(form=form).penalty(z, plain(6))
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(gradient).all()
    assert gradient[:, 2:].abs().max() == 0
    ratio = 4 / 16 if form == "paper" else 2 / 12
    alone = FedDecorr(form=form).penalty(z[:, :2], plain(6))
    assert float(value.detach()) == pytest.approx(ratio * float(alone.detach()), rel=1e-12)


@FORMS
def test_a_single_feature_has_nothing_to_be_correlated_with(form: Any) -> None:
    z = drawn(6, 1).requires_grad_()
    value = FedDecorr(form=form).penalty(z, plain(6))
    assert float(value.detach()) == pytest.approx(1.0 if form == "paper" else 0.0, abs=1e-7)
    assert torch.autograd.grad(value, z)[0].abs().max() < 1e-7


@FORMS
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_padding_contributes_nothing(kept: int, form: Any) -> None:
    part, task = random_clients((6,)).load(0)["train"], two_layers()
    mask, model = (torch.arange(6) < kept).double(), task.network.initialize(0)
    x = torch.where(mask[:, None] > 0, part.x, 1e3 * part.x)
    method = FedDecorr(decorrelation_weight=2.0, form=form)
    padded = method.objective(model, Batch(x, part.y, mask), task)
    assert_close(padded, method.objective(model, Batch(part.x[:kept], part.y[:kept]), task), 1e-12)


OPTIMIZERS: list[dict[str, Any]] = [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@MODES
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=["momentum", "adam"])
def test_rounds_are_those_of_plain_pytorch(changes: dict[str, Any], mode: str) -> None:
    """Whole mini-batches, with unequal clients (one of a single sample) and partial participation."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 3, "momentum": 0.0, **changes})
    toy = toy_of(FedDecorr(decorrelation_weight=0.6), train, mode=mode)
    expected = copy(toy.server["model"])
    for cohort in ([0, 2], [1, 2, 3]):
        parts = [toy.dataset.load(k)["train"] for k in cohort]
        expected = by_hand(expected, [Batch(part.x, part.y) for part in parts], train)
        assert_close(toy.step(cohort)["model"], expected, 1e-10)


def by_hand(server: Tree, clients: list[Batch], train: TrainConfig) -> Tree:
    """A round of three local steps."""
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for batch in clients:
        w = {name: leaf.clone().requires_grad_() for name, leaf in server.items()}
        if train.optimizer == "sgd":
            rule: Any = torch.optim.SGD(w.values(), train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
        else:
            rule = torch.optim.Adam(w.values(), train.lr, weight_decay=train.weight_decay)
        for _ in range(3):
            z = torch.relu(batch.x @ w["inner.weight"].T + w["inner.bias"])
            value = F.cross_entropy(z @ w["head.weight"].T + w["head.bias"], batch.y)
            if len(z) > 1:
                standardised = (z - z.mean(0)) / (z.var(0, correction=0) + EPSILON).sqrt()
                value = value + 0.6 * (standardised.T @ standardised / len(z)).square().sum() / z.shape[1] ** 2
            rule.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            rule.step()
        for name, leaf in w.items():
            mean[name] += leaf.detach() * (len(batch.y) / sum(len(one.y) for one in clients))
    return mean


@FORMS
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped_on_ragged_mini_batches(make: Any, form: Any) -> None:
    looped, stacked = (toy_of(FedDecorr(form=form), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)


def test_features_become_less_correlated_than_those_of_fedavg() -> None:
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 30})
    data, found = random_clients((40,)), []
    for method in (FedAvg(), FedDecorr(decorrelation_weight=5.0)):
        toy = toy_of(method, train, dataset=data)
        model, part = toy.step([0])["model"], data.load(0)["train"]
        features = toy.task.network.head_inputs_and_logits(model, part.x)[0]
        found.append(float(FedDecorr().penalty(features, plain(40))))
    assert found[1] < 0.9 * found[0]
