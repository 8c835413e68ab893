"""MOON: invariants MOON of the contrastive term, its gradient, first participations, and what clients keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, vmap
from torch.func import grad

from algorithms.fedavg import FedAvg
from algorithms.moon import MOON, contrastive
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.partial_toys import COHORTS, TRAIN, initial, three_layers, toy_of, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_moon_1_without_weight_it_is_fedavg(make: Any) -> None:
    both = toy_of(MOON(contrast_weight=0), task=make()), toy_of(FedAvg(), task=make())
    for cohort in COHORTS:
        assert_equal(both[0].step(cohort), both[1].step(cohort))
    assert vectors(both[0].scores(), "global") == vectors(both[1].scores(), "global")


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_moon_2_first_participations_are_those_of_fedavg(mode: str) -> None:
    toys = [toy_of(method, mode=mode) for method in (MOON(contrast_weight=5), FedAvg())]
    for cohort in ([0, 1], [2], [3]):
        assert_equal(toys[0].step(cohort), toys[1].step(cohort))
    left, right = (toy.step([0, 1])["model"]["inner.weight"] for toy in toys)
    assert (left - right).abs().max() > 1e-4
    # from an initial previous model the first round differs too, where the received one is another
    initially = toy_of(MOON(contrast_weight=5, first_previous="initial"), mode=mode)
    plain = toy_of(FedAvg(), mode=mode)
    for toy in (initially, plain):
        toy.step([0, 1])
        toy.step([2])
    apart = (initially.server["model"]["inner.weight"] - plain.server["model"]["inner.weight"]).abs().max()
    assert apart > 1e-5


def test_inv_moon_3_a_single_client_follows_fedavg() -> None:
    data = random_clients([12])
    toys = [Toy(method, data, two_layers(), TRAIN) for method in (MOON(contrast_weight=5), FedAvg())]
    for _ in range(4):
        # round-off alone, since both cosines are the same number
        assert_close(toys[0].step([0]), toys[1].step([0]), 1e-12)
    z, g = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(contrastive(z, g, g, 0.5), torch.full((6,), math.log(2), dtype=torch.float64))


def drawn(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    z, g, p = scale * torch.randn(3, 50, 7, generator=generator, dtype=torch.float64)
    return z, g, p


@pytest.mark.parametrize("temperature", [0.05, 0.5, 2.0])
def test_inv_moon_4_the_term_is_that_of_the_paper_and_bounded(temperature: float) -> None:
    z, g, p = drawn()
    found = contrastive(z, g, p, temperature)
    similar = [F.cosine_similarity(z, other) / temperature for other in (g, p)]
    assert_close(found, -torch.stack(similar).log_softmax(0)[0], 1e-12)
    extreme = torch.cat([found, contrastive(z, z, -z, temperature), contrastive(z, -z, z, temperature)])
    low, high = (F.softplus(torch.tensor(sign * 2 / temperature, dtype=torch.float64)) for sign in (-1, 1))
    assert (extreme >= low * (1 - 1e-12)).all() and (extreme <= high * (1 + 1e-12)).all()


def test_inv_moon_5_the_gradient_is_orthogonal_to_the_features() -> None:
    z, g, p = drawn(4.0)
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(contrastive(z, g, p, 0.5).sum(), z)
    assert ((z * gradient).sum(-1).abs() < 1e-12).all()
    assert gradient.abs().max() > 1e-3


def test_inv_moon_6_without_steps_the_previous_model_is_the_received_one() -> None:
    train = TRAIN.model_copy(update={"lr": 0.0, "batch_size": None, "local_epochs": 1, "weight_decay": 0.0})
    toy = toy_of(MOON(), train, two_layers())
    for _ in range(2):
        toy.step([0, 1, 2, 3])
        for client in range(4):
            assert_equal(toy.states()[client], {"previous": initial(toy)})


def test_inv_moon_7_zero_features_have_neither_value_nor_gradient_beyond_bounds() -> None:
    z, g, p = (torch.zeros(3, 7), torch.zeros(3, 7), torch.zeros(3, 7))
    g[0], p[1] = 1.0, 2.0
    for found in (
        torch.autograd.grad(contrastive(z.requires_grad_(), g, p, 0.5).sum(), z)[0],
        vmap(grad(lambda a, b, c: contrastive(a[None], b[None], c[None], 0.5).sum()))(z.detach(), g, p),
    ):
        assert torch.isfinite(found).all()
    assert_close(contrastive(z.detach(), g, p, 0.5), torch.full((3,), math.log(2)), 1e-6)


def test_a_step_goes_down_cross_entropy_and_contrast_of_what_was_trained_and_received() -> None:
    train = TrainConfig(rounds=3, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)
    toy = toy_of(MOON(contrast_weight=3, temperature=0.2), train, normalized_layers())
    toy.step([1])
    previous = copy(toy.server["model"])
    toy.step([0])
    received, part = copy(toy.server["model"]), toy.dataset.load(1)["train"]
    names = toy.task.network.parameter_names
    moved: Tree = {**copy(received), **{name: received[name].clone().requires_grad_() for name in names}}
    z, logits = toy.task.network.head_inputs_and_logits(moved, part.x, training=True)
    g, p = (toy.task.network.head_inputs_and_logits(model, part.x)[0] for model in (received, previous))
    value = F.cross_entropy(logits, part.y) + 3 * contrastive(z, g, p, 0.2).mean()
    found = torch.autograd.grad(value, [moved[name] for name in names])
    expected = {name: (moved[name] - 0.1 * slope).detach() for name, slope in zip(names, found, strict=True)}
    after = toy.step([1])["model"]
    assert_close({name: after[name] for name in names}, expected, 1e-12)
    assert_equal(toy.states()[1]["previous"], after)
    assert set(toy.states()) == {0, 1}


def test_padding_adds_nothing() -> None:
    toy = toy_of(MOON())
    models = [two_layers().network.initialize(seed) for seed in range(3)]
    part = toy.dataset.load(0)["train"]
    frozen = {"received": models[1], "previous": models[2]}
    whole = MOON().objective(models[0], Batch(part.x[:3], part.y[:3]), two_layers(), frozen)
    x, y = torch.cat([part.x[:3], 1e3 * part.x[:2]]), torch.cat([part.y[:3], part.y[:2]])
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
    assert_close(MOON().objective(models[0], Batch(x, y, mask), two_layers(), frozen), whole, 1e-12)


def test_vectorized_agrees_with_looped_where_some_have_a_previous_model_and_others_have_none() -> None:
    looped, stacked = (toy_of(MOON(), task=two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1], [0, 2, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())
