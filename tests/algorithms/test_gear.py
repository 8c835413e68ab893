"""GEAR: an oracle in plain PyTorch, margins by hand, limits that are FAT and federated averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fat import FAT
from algorithms.fedavg import FedAvg
from algorithms.gear import GEAR
from rayfl.params import copy
from tests.support.attack_oracles import COHORTS, STRONG, attack, skewed_clients, stepped, toy_of
from tests.support.toy_networks import normalized_layers
from tests.support.toys import assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


@MODES
@pytest.mark.parametrize("options", [{}, {"margin": 2.5, "unit": "input"}])
def test_inv_gear_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = GEAR(**STRONG, **options)
    toy = toy_of(method, mode=mode, dataset=skewed_clients())
    server = copy(toy.server["model"])

    def value(model: nn.Module, x: Tensor, y: Tensor, data: Any) -> Tensor:
        counts = {label: int((data.y == label).sum()) for label in data.y.tolist()}
        logits, losses = model(attack(method, model, x, y, data.x)), []
        for row, label in zip(logits, y.tolist(), strict=True):
            margin = method.margin * min(counts.values()) ** 0.25 / counts[label] ** 0.25
            others = [row[c] for c in range(3) if c != label]
            losses.append(torch.log1p(sum(torch.exp(one - row[label] + margin) for one in others)))
        return torch.stack(losses).mean()

    for cohort in COHORTS:
        server = stepped(toy, server, cohort, value)
        assert_close(toy.step(cohort)["model"], server, 1e-12)


@MODES
def test_inv_gear_2_without_margins_it_is_fat_on_attacked_samples_alone_and_without_attacks_fedavg(mode: str) -> None:
    for limit, other in (
        (GEAR(**STRONG, margin=0, start="ball"), FAT(**STRONG, keep_clean=False, start="ball")),
        (GEAR(margin=0, radius=0), FedAvg()),
    ):
        one, two = (toy_of(a, mode=mode, dataset=skewed_clients()) for a in (limit, other))
        for cohort in COHORTS:
            assert_equal(one.step(cohort), two.step(cohort))


def test_inv_gear_3_margins_are_largest_for_the_rarest_class_and_go_by_shares() -> None:
    counts = torch.tensor([16, 0, 81, 256]).double()
    assert GEAR(margin=0.6).margins(counts).tolist() == pytest.approx([0.6, 0, 0.4, 0.3], rel=1e-15)
    assert_close(GEAR().margins(counts), GEAR().margins(7 * counts), 1e-15)
    assert GEAR().margins(torch.zeros(3).double()).tolist() == [0, 0, 0]


def test_without_attacks_margins_are_on_samples_as_they_are() -> None:
    toy = toy_of(GEAR(radius=0, margin=1.5), dataset=skewed_clients())
    rows = torch.tensor([1.5 * (1 / n) ** 0.25 for n in (4, 1, 2)], dtype=torch.float64)

    def value(model: nn.Module, x: Tensor, y: Tensor, data: Any) -> Tensor:
        return F.cross_entropy(model(x) - F.one_hot(y, 3) * rows, y)

    expected = stepped(toy, copy(toy.server["model"]), [0], value)
    assert_close(toy.step([0])["model"], expected, 1e-12)


def test_vectorized_agrees_with_looped_where_layers_normalize() -> None:
    looped, stacked = (
        toy_of(GEAR(**STRONG, start="near"), task=normalized_layers(0.4), mode=mode, dataset=skewed_clients())
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(stacked.step(cohort), looped.step(cohort), 1e-12)
