"""CalFAT: an oracle in plain PyTorch, attacks by divergence by hand, limits that are FAT, absent classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.calfat import CalFAT
from algorithms.fat import FAT
from algorithms.fedlc import EXCLUDED
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.errors import ConfigError
from rayfl.params import copy
from rayfl.tasks.base import Batch
from tests.support.attack_oracles import COHORTS, STRONG, Oracle, attack, skewed_clients, stepped, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
BY_LOSS: dict[str, Any] = {**STRONG, "attack": "cross_entropy", "start": "sample"}


def shift(data: Any, absent: float = 1.0) -> Tensor:
    """log n_c of a client."""
    counts = [int((data.y == c).sum()) or absent for c in range(3)]
    return torch.tensor([math.log(n) for n in counts], dtype=torch.float64)


@MODES
@pytest.mark.parametrize("options", [{}, {"logit_scale": 2.0, "absent_count": 0.5}])
def test_inv_calfat_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = CalFAT(**BY_LOSS, **options)
    toy = toy_of(method, mode=mode, dataset=skewed_clients())
    server = copy(toy.server["model"])

    def value(model: nn.Module, x: Tensor, y: Tensor, data: Any) -> Tensor:
        scale, prior = method.logit_scale, shift(data, method.absent_count)

        def of(logits: Tensor, place: int) -> Tensor:
            return F.cross_entropy(scale * logits + prior, y[place])

        return F.cross_entropy(scale * model(attack(method, model, x, y, data.x, of)) + prior, y)

    for cohort in COHORTS:
        server = stepped(toy, server, cohort, value)
        assert_close(toy.step(cohort)["model"], server, 1e-12)


@pytest.mark.parametrize("start", ["near", "ball"])
def test_inv_calfat_2_attacks_go_uphill_on_the_divergence_of_calibrated_probabilities(start: Any) -> None:
    task, data, scale = two_layers(), skewed_clients().load(0)["train"], 4.0
    method, model = CalFAT(**STRONG, start=start, logit_scale=scale), task.network.initialize(0)
    low, high, prior = data.x.amin(0), data.x.amax(0), shift(data)
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(3), len(data.y)))
    noise = normals(keys, 5)
    change = 0.001 * noise if start == "near" else 0.2 * torch.erf(noise / math.sqrt(2))
    begun = (data.x + change * (high - low)).clamp(low, high)
    oracle = Oracle(model)
    with torch.no_grad():
        before = (oracle(data.x) + prior / scale).softmax(1)

    def divergence(logits: Tensor, place: int) -> Tensor:
        after = (logits + prior / scale).log_softmax(0)
        return (before[place] * (before[place].log() - after)).sum()

    moved = attack(method, oracle, data.x, data.y, data.x, divergence, begun)
    frozen = {"low": low, "high": high, "unit": high - low, "prior": prior}
    found = method.objective(model, Batch(data.x, data.y), task, frozen, {"keys": keys})
    assert_close(found, F.cross_entropy(scale * oracle(moved) + prior, data.y).detach(), 1e-12)


@MODES
def test_inv_calfat_3_with_equally_many_samples_of_every_class_it_is_fat_on_attacked_samples_alone(mode: str) -> None:
    generator, y = torch.Generator().manual_seed(1), torch.tensor([0, 1, 2] * 3)
    data = ListDataset([(torch.randn(9, 5, generator=generator).double(), y) for _ in range(4)], 3)
    methods = CalFAT(**BY_LOSS, logit_scale=1), FAT(**STRONG, keep_clean=False)
    one, two = (toy_of(method, mode=mode, dataset=data) for method in methods)
    for cohort in COHORTS:
        assert_close(one.step(cohort), two.step(cohort), 1e-12)


def test_inv_calfat_4_priors_are_logarithms_and_absent_classes_have_an_assumed_one_or_none() -> None:
    counts = torch.tensor([9, 0, 1]).double()
    assert CalFAT().prior(counts).tolist() == pytest.approx([math.log(9), 0, 0])
    assert CalFAT(absent_count=0.1).prior(counts).tolist() == pytest.approx([math.log(9), math.log(0.1), 0])
    assert CalFAT(absent_count=0).prior(counts).tolist() == pytest.approx([math.log(9), -EXCLUDED, 0])


def test_inv_calfat_5_a_class_that_is_left_out_is_not_pushed_down() -> None:
    data, method = skewed_clients().load(1)["train"], CalFAT(**STRONG, absent_count=0)
    task, frozen = two_layers(), {"prior": method.prior(torch.tensor([0, 1, 5]).double())}
    low, high = data.x.amin(0), data.x.amax(0)
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(3), len(data.y)))
    model = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(0).items()}
    frozen |= {"low": low, "high": high, "unit": high - low}
    method.objective(model, Batch(data.x, data.y), task, frozen, {"keys": keys}).backward()
    slope = model["head.bias"].grad
    assert slope is not None and slope[0] == 0 and (slope[1:] != 0).all()


@pytest.mark.parametrize("options", [{"attack": "kl"}, {"attack": "kl", "radius": 0.0}])
def test_vectorized_agrees_with_looped(options: dict[str, Any]) -> None:
    looped, stacked = (
        toy_of(CalFAT(**{**STRONG, **options}), task=normalized_layers(0.4), mode=mode, dataset=skewed_clients())
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(stacked.step(cohort), looped.step(cohort), 1e-10)


def test_without_attacks_options_of_attacks_change_nothing() -> None:
    one, two = (
        toy_of(a, dataset=skewed_clients()) for a in (CalFAT(radius=0), CalFAT(radius=0, attack="cross_entropy"))
    )
    assert_equal(one.step([0, 1]), two.step([0, 1]))


def test_a_divergence_from_the_sample_itself_is_refused() -> None:
    toy = toy_of(FAT())
    with pytest.raises(ConfigError, match=r"algorithm\.start=sample with algorithm\.attack=kl"):
        CalFAT(start="sample").check(toy.task, toy.context)
    CalFAT(start="sample", radius=0).check(toy.task, toy.context)
