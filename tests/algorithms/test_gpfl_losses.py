"""GPFL: the losses of global features, their bounds and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from algorithms.gpfl import GPFL, cosines, valve
from rayfl.errors import ConfigError
from rayfl.tasks.base import Batch
from tests.support.gpfl_toys import drawn, example
from tests.support.partial_toys import partly_fixed
from tests.support.toys import assert_close


def test_inv_gp_4_cosines_never_shorten_an_embedding() -> None:
    method, toy, trained, batch, frozen = example(0.0)
    table = trained["embedding"].clone().requires_grad_()
    value = method.objective({**trained, "embedding": table}, batch, toy.task, frozen)
    (slope,) = torch.autograd.grad(value, table)
    assert slope.abs().max() > 1e-3
    assert ((table * slope).sum(-1).abs() < 1e-12).all()
    assert ((table - 0.5 * slope).norm(dim=-1) >= table.norm(dim=-1)).all()


def test_inv_gp_5_the_loss_of_cosines_is_bounded() -> None:
    for classes in (2, 10):
        table = drawn(1, classes, 7)
        best, worst = table[0], -table[0]
        y = torch.zeros(1, dtype=torch.int64)
        low, high = (math.log(1 + (classes - 1) * math.exp(sign * 2)) for sign in (-1, 1))
        for features in (best, worst, *drawn(2, 50, 7)):
            assert low <= float(F.cross_entropy(cosines(features[None], table), y)) <= high
    opposed = torch.stack([best, worst])
    assert abs(float(F.cross_entropy(cosines(best[None], opposed), y)) - math.log(1 + math.exp(-2))) < 1e-12


def test_inv_gp_6_the_distance_is_to_the_received_embeddings() -> None:
    method, toy, trained, batch, frozen = example(0.5)
    plain = GPFL(guidance_weight=0)
    slopes = []
    for one in (method, plain):
        table = trained["embedding"].clone().requires_grad_()
        value = one.objective({**trained, "embedding": table}, batch, toy.task, frozen)
        slopes.append((value.detach(), torch.autograd.grad(value, table)[0]))
    assert torch.equal(slopes[0][1], slopes[1][1])
    features = toy.task.network.head_inputs_and_logits(trained["model"], batch.x)[0]
    both = valve(trained["valve"], features, frozen["global"])
    distance = torch.linalg.matrix_norm(both - frozen["embedding"][batch.y])
    assert_close(slopes[0][0] - slopes[1][0], 0.5 * distance, 1e-9)
    # no gradient where there is no distance
    exact = {**frozen, "embedding": both[:1].expand(3, 7)}
    one_sample = Batch(batch.x[:1], batch.y[:1])
    model = {name: leaf.clone().requires_grad_() for name, leaf in trained["model"].items()}
    with_distance, without = (
        torch.autograd.grad(
            one.objective({**trained, "model": model}, one_sample, toy.task, exact), list(model.values())
        )
        for one in (method, plain)
    )
    for left, right in zip(with_distance, without, strict=True):
        assert_close(left, right, 1e-5)


def test_padding_adds_nothing_and_a_model_without_body_or_head_is_refused() -> None:
    method, toy, trained, batch, frozen = example()
    whole = method.objective(trained, Batch(batch.x[:3], batch.y[:3]), toy.task, frozen)
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
    padded = Batch(torch.cat([batch.x[:3], 9 * batch.x[:2]]), torch.cat([batch.y[:3], batch.y[:2]]), mask)
    assert_close(method.objective(trained, padded, toy.task, frozen), whole, 1e-12)
    with pytest.raises(ConfigError, match="GPFL needs the last layer's weight"):
        GPFL().check(partly_fixed("head.weight"), toy.context)
    with pytest.raises(ConfigError, match="no body is left"):
        GPFL().check(partly_fixed("inner.weight", "inner.bias"), toy.context)
