"""FedRCL: the terms sample by sample, rounds in plain PyTorch, limits that are federated averaging, padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, vmap
from torch.func import grad

from algorithms.fedavg import FedAvg
from algorithms.fedrcl import FedRCL
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, labelled, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "several": {"positives": 2, "negatives": 3, "temperature": 0.5, "threshold": 0.4, "penalty_weight": 0.3},
}


def drawn(rows: int, columns: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) + 1


def by_hand(z: Tensor, y: Tensor, method: FedRCL) -> Tensor:
    """Mean of alpha S_i + beta D_i, one sample after the other."""
    units = z / z.pow(2).sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    total = z.sum() * 0
    for i in range(len(z)):
        alike = {j: (units[i] * units[j]).sum() for j in range(len(z))}
        known = {j: float(one.detach()) for j, one in alike.items()}
        own = sorted((j for j in alike if y[j] == y[i]), key=lambda j: known[j])
        near = sorted((j for j in alike if y[j] != y[i]), key=lambda j: -known[j])[: method.negatives]
        for j in own[: method.positives]:
            odds = [torch.exp((alike[k] - alike[j]) / method.temperature) for k in near]
            if odds:
                total = total + method.contrast_weight * torch.log1p(torch.stack(odds).sum()) / method.positives
        others = [j for j in own if j != i][: method.positives]
        odds = [torch.exp((alike[j] - 1) / method.temperature) for j in others if alike[j] >= method.threshold]
        if odds:
            total = total + method.penalty_weight * torch.log1p(torch.stack(odds).sum()) / method.positives
    return total / len(z)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("labels", [[0, 1, 0, 2, 1, 0, 0], [1, 1, 1, 1], [0, 1, 2], [0, 0], [1]])
def test_inv_rcl_1_value_and_gradient_are_those_of_the_sums_written_out(labels: list[int], name: str) -> None:
    z, y, method = drawn(len(labels)).requires_grad_(), torch.tensor(labels), FedRCL(**SETTINGS[name])
    batch = Batch(z, y)
    found, expected = batch.mean(method.relaxed(z, batch)), by_hand(z, y, method)
    assert_close(found.detach(), expected.detach(), 1e-12)
    left, right = (torch.autograd.grad(value, z)[0] for value in (found, expected))
    assert_close(left, right, 1e-12)


def logits_of(model: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden, hidden @ model["head.weight"].T + model["head.bias"]


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_rcl_2_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedRCL(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate(COHORTS[:2]):
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden, logits = logits_of(leaves, part.x[index])
                value = F.cross_entropy(logits, part.y[index]) + by_hand(hidden, part.y[index], method)
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            share = SIZES[k] / sum(SIZES[one] for one in cohort)
            mean = {key: mean[key] + share * leaf.detach() for key, leaf in leaves.items()}
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_rcl_3_without_weights_it_is_federated_averaging_to_the_bit(make: Any) -> None:
    ours = toy_of(FedRCL(contrast_weight=0, penalty_weight=0), task=make())
    theirs = toy_of(FedAvg(), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


def test_inv_rcl_4_of_clients_of_one_class_and_features_not_alike_it_is_federated_averaging() -> None:
    """One class has no contrast, and a threshold that nothing reaches no penalty."""
    data = labelled([0] * 8, [1] * 6)
    method = FedRCL(threshold=1.0, contrast_weight=7.0)
    ours, theirs = (Toy(one, data, two_layers(), TRAIN) for one in (method, FedAvg()))
    for cohort in ([0, 1], [1], [0]):
        assert_close(ours.step(cohort), theirs.step(cohort), 1e-12)


def test_inv_rcl_5_lengths_of_features_do_not_matter_and_a_collapsed_class_has_the_most_penalty() -> None:
    z, y, method = drawn(7), torch.tensor([0, 1, 0, 2, 1, 0, 0]), FedRCL()
    batch = Batch(z, y)
    scaled = z * torch.arange(1, 8, dtype=torch.float64)[:, None]
    assert_close(method.relaxed(scaled, batch), method.relaxed(z, batch), 1e-12)
    collapsed, one = z[:1].expand(5, -1), Batch(z[:5], torch.zeros(5, dtype=torch.int64))
    assert_close(method.relaxed(collapsed, one), torch.full((5,), math.log(2), dtype=torch.float64), 1e-12)


def test_inv_rcl_6_inactive_features_have_a_finite_gradient() -> None:
    z = torch.cat([drawn(3), torch.zeros(3, 4, dtype=torch.float64)]).requires_grad_()
    batch = Batch(z, torch.tensor([0, 1, 0, 1, 0, 0]))
    value = FedRCL(positives=3, negatives=4, threshold=-1.0).relaxed(z, batch).sum()
    assert torch.isfinite(torch.autograd.grad(value, z)[0]).all()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_padding_contributes_nothing_also_under_vmap(kept: int, name: str) -> None:
    z, y, method = drawn(6), torch.tensor([0, 1, 0, 1, 0, 0]), FedRCL(**SETTINGS[name])
    mask = (torch.arange(6) < kept).double()
    padded = torch.where(mask[:, None] > 0, z, torch.nan)

    def value(features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        batch = Batch(features, labels, mask)
        return batch.mean(method.relaxed(features, batch))

    alone = grad(value)(z[:kept], y[:kept])
    found = vmap(grad(value))(padded[None], y[None], mask[None])[0]
    assert_close(value(padded, y, mask), value(z[:kept], y[:kept]), 1e-12)
    assert_close(found[:kept], alone, 1e-12)
    assert not found[kept:].any()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped(make: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(FedRCL(**SETTINGS[name]), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-9)
    assert "failed together" not in caplog.text


def test_what_is_idle() -> None:
    assert len(FedRCL(contrast_weight=0, negatives=3).idle_settings()) == 1
    assert len(FedRCL(penalty_weight=0, threshold=0.2).idle_settings()) == 1
