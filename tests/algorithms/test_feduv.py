"""FedUV: both terms by hand, rounds in plain PyTorch, limits that are federated averaging, padding, equal samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, vmap
from torch.func import grad

from algorithms.fedavg import FedAvg
from algorithms.feduv import FedUV, lack_of_variance, median, nearness
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

WEIGHTS: dict[str, dict[str, Any]] = {
    "both": {},
    "variance": {"variance_weight": 4.0, "uniformity_weight": 0.0},
    "uniformity": {"variance_weight": 0.0, "uniformity_weight": 3.0},
}


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(rows: int) -> Batch:
    return Batch(torch.zeros(rows, 5), torch.zeros(rows, dtype=torch.int64))


def by_hand(z: Tensor, logits: Tensor, method: FedUV) -> Tensor:
    """lambda V + mu U with PyTorch's own distances, median and deviations."""
    if len(z) == 1:
        return 0 * z.sum()
    gamma = float(torch.eye(logits.shape[1], dtype=torch.float64).std(dim=0).mean())
    lacking = F.relu(gamma - logits.softmax(1).std(dim=0)).mean()
    squares = torch.pdist(z).pow(2)
    near = (-squares / torch.median(squares[squares > 0])).exp().mean()
    return method.variance_weight * lacking + method.uniformity_weight * near


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [2, 3, 7, 8])
def test_inv_uv_1_values_and_gradients_are_those_of_pytorchs_own_functions(rows: int, weights: str) -> None:
    z, logits, method = drawn(rows, 4).requires_grad_(), drawn(rows, 3, 1).requires_grad_(), FedUV(**WEIGHTS[weights])
    lacking, near = lack_of_variance(logits, plain(rows)), nearness(z, plain(rows))
    found = method.variance_weight * lacking + method.uniformity_weight * near
    expected = by_hand(z, logits, method)
    assert_close(found.detach(), expected.detach(), 1e-13)
    for left, right in zip(*(torch.autograd.grad(value, [z, logits]) for value in (found, expected)), strict=True):
        assert_close(left, right, 1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_inv_uv_2_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: str) -> None:
    method = FedUV(**WEIGHTS[weights])
    sizes = (9, 12, 6, 1)
    toy = Toy(method, random_clients(sizes), two_layers(), TRAIN)
    model = initial(toy)
    for round, cohort in enumerate(([0, 3], [1, 2])):
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(sizes[k], 4, 2 * -(-sizes[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
                logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
                value = F.cross_entropy(logits, part.y[index]) + by_hand(hidden, logits, method)
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            share = sizes[k] / sum(sizes[one] for one in cohort)
            mean = {key: mean[key] + share * leaf.detach() for key, leaf in leaves.items()}
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_uv_3_without_weights_it_is_federated_averaging_to_the_bit(make: Any) -> None:
    ours = toy_of(FedUV(variance_weight=0, uniformity_weight=0), task=make())
    theirs = toy_of(FedAvg(), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_uv_4_of_mini_batches_of_one_sample_it_is_federated_averaging(mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1, "local_epochs": 1})
    both = [
        Toy(method, random_clients((3, 2, 1)), two_layers(), train, mode=mode)
        for method in (FedUV(variance_weight=50.0, uniformity_weight=50.0), FedAvg())
    ]
    for cohort in ([0, 1, 2], [0, 2]):
        assert_close(both[0].step(cohort), both[1].step(cohort), 1e-12)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_inv_uv_5_sure_samples_of_every_class_lack_no_variance_and_those_of_one_lack_all(classes: int) -> None:
    sure = 1e3 * torch.eye(classes, dtype=torch.float64)
    assert abs(float(lack_of_variance(sure, plain(classes)))) < 1e-15
    one = sure[:1].expand(classes, -1).clone().requires_grad_()
    lacking = lack_of_variance(one, plain(classes))
    assert float(lacking.detach()) == pytest.approx(1 / math.sqrt(classes), rel=1e-15)
    assert not torch.autograd.grad(lacking, one)[0].any()


def test_inv_uv_6_the_scale_and_the_place_of_features_do_not_matter() -> None:
    z = drawn(8, 5)
    assert float(nearness(7 * z - 3, plain(8))) == pytest.approx(float(nearness(z, plain(8))), rel=1e-12)
    # two pairs of distance 0 count 1, but not for the median
    equal = torch.cat([z[:2], z[:2]])
    assert float(nearness(equal, plain(4))) == pytest.approx((2 + 4 * math.exp(-1)) / 6, rel=1e-12)
    same = z[:1].expand(4, -1).clone().requires_grad_()
    found = nearness(same, plain(4))
    assert float(found.detach()) == 1 and not torch.autograd.grad(found, same)[0].any()


def test_medians_are_pytorchs() -> None:
    for number in range(1, 8):
        values = drawn(number, 1).square()[:, 0]
        padded = torch.cat([values, torch.zeros(3, dtype=torch.float64)])
        assert median(padded, torch.arange(number + 3) < number) == values.median()
    assert median(padded, torch.zeros(len(padded), dtype=torch.bool)) == 1


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_padding_contributes_nothing_also_under_vmap(kept: int) -> None:
    z, mask = drawn(6, 3), (torch.arange(6) < kept).double()
    padded = torch.where(mask[:, None] > 0, z, torch.nan)

    def value(rows: Tensor, mask: Tensor | None = None) -> Tensor:
        batch = Batch(rows, rows, mask)
        return lack_of_variance(rows, batch) + 2 * nearness(rows, batch)

    found = vmap(grad(value))(padded[None], mask[None])[0]
    assert_close(value(padded, mask), value(z[:kept]), 1e-12)
    assert_close(found[:kept], grad(value)(z[:kept]), 1e-12)
    assert not found[kept:].any()


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(FedUV(), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-9)
    assert "failed together" not in caplog.text


def test_each_term_does_what_it_is_for() -> None:
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 20})
    data, found = random_clients((max(SIZES),)), []
    for method in (FedAvg(), FedUV(variance_weight=0, uniformity_weight=5.0), FedUV(variance_weight=5.0)):
        toy = Toy(method, data, two_layers(), train)
        model, part = toy.step([0])["model"], data.load(0)["train"]
        features, logits = toy.task.network.head_inputs_and_logits(model, part.x)
        batch = plain(len(features))
        found.append((float(nearness(features, batch)), float(lack_of_variance(logits, batch))))
    assert found[1][0] < 0.98 * found[0][0]
    assert found[2][1] < 0.95 * found[0][1]
