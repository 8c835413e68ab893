"""LoRA-FAIR: an oracle in plain PyTorch, the limits of its weight, the angle, what travels, degenerate layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.lora_fair import LoRAFair
from algorithms.parts.corrected_factor import corrected
from rayfl.params import num_bytes
from tests.support.adapted import adapted_toy
from tests.support.low_rank_toys import COHORTS, SHAPES, low_rank_toy, mean, mean_product, shares_of, trained_alone
from tests.support.toys import assert_close, assert_equal

SEVERAL = [cohort for cohort in COHORTS if len(cohort) > 1]


def value(delta: Tensor, b: Tensor, a: Tensor, target: Tensor, weight: float, squared: bool) -> Tensor:
    """1 - cos(M, (B + Delta) A) + lambda ||Delta||, dense."""
    angle = F.cosine_similarity(((b + delta) @ a).flatten(), target.flatten(), 0)
    return 1 - angle + weight * (delta.square().sum() if squared else delta.norm())


def slope_of(delta: Tensor, *given: Any) -> Tensor:
    """Its gradient."""
    point = delta.detach().requires_grad_()
    (found,) = torch.autograd.grad(value(point, *given), point)
    return found


def hessian_of(delta: Tensor, *given: Any) -> Tensor:
    """Its second derivative, shape (o r, o r)."""
    function: Any = torch.autograd.functional.hessian
    found: Tensor = function(lambda one: value(one, *given), delta)
    return found.reshape(delta.numel(), -1)


def minimized(b: Tensor, a: Tensor, target: Tensor, weight: float, squared: bool) -> Tensor:
    """B + Delta by descent on the dense matrices with autograd, and then by Newton's method on all entries."""
    given = (b, a, target, weight, squared)
    slope = slope_of(torch.zeros_like(b), b, a, target, 0.0, True)
    if not squared and slope.norm() <= weight:
        return b
    delta = (-1e-4 * b.norm() ** 2 * slope).requires_grad_()
    optimizer: Any = torch.optim.LBFGS([delta], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        delta.grad = slope_of(delta, *given)
        return value(delta.detach(), *given)

    optimizer.step(closure)
    delta = delta.detach()
    for _ in range(4):
        delta = delta - torch.linalg.solve(hessian_of(delta, *given), slope_of(delta, *given).flatten()).view_as(b)
    return b + delta


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(("weight", "penalty"), [(0.01, "norm"), (0.03, "norm"), (0.02, "squared")])
def test_inv_fair_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weight: float, penalty: Any, weights: Any) -> None:
    toy = low_rank_toy(LoRAFair(correction_weight=weight, penalty=penalty, aggregation=weights))
    names, corrections = toy.task.network.parameter_names, 0
    model = dict(toy.server["model"])
    for round, cohort in enumerate(COHORTS):
        sent, shares = [trained_alone(toy, model, names, k, round) for k in cohort], shares_of(cohort, weights)
        model = {name: mean(sent, shares, name) for name in names}
        for site in SHAPES:
            a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
            found = minimized(model[b], model[a], mean_product(sent, shares, site), weight, penalty == "squared")
            corrections += bool((found - model[b]).norm() > 1e-6)
            model[b] = found
        assert_close(toy.step(cohort)["model"], model, 1e-12)
    assert corrections > 3


def problem(seed: int, o: int = 9, r: int = 3, i: int = 8, clients: int = 4) -> tuple[Tensor, Tensor, Any, Tensor]:
    """Mean factors, the mean product as a product, and dense, of clients some way from each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"generator": generator, "dtype": torch.float64}
    one_b, one_a = torch.randn(o, r, **shape), torch.randn(r, i, **shape)
    b = one_b + torch.randn(clients, o, r, **shape)
    a = one_a + torch.randn(clients, r, i, **shape)
    left, right = torch.cat(list(b / clients), 1), torch.cat(list(a))
    return b.mean(0), a.mean(0), (left, right), (b @ a).mean(0)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("weight", [1e-8, 1e-6, 1e-3, 0.01, 0.1, 1.0])
def test_inv_fair_2_what_comes_out_is_a_minimum(weight: float, squared: bool) -> None:
    """No slope is left, the second derivative is not negative, and the value is below the one at Delta = 0."""
    for b, a, products, target in map(problem, range(4)):
        given, zero = (b, a, target, weight, squared), torch.zeros_like(b)
        delta = corrected(b, a, products, weight, squared) - b
        if not squared and slope_of(zero, b, a, target, 0.0, True).norm() <= weight:
            assert torch.equal(delta, zero)
            continue
        assert float(slope_of(delta, *given).norm()) < 1e-13
        assert float(torch.linalg.eigvalsh(hessian_of(delta, *given)).min()) > -1e-12
        assert float(value(delta, *given)) < float(value(zero, *given))


@pytest.mark.parametrize("seed", range(3))
def test_inv_fair_3_without_weight_the_angle_is_the_smallest_that_a_allows(seed: int) -> None:
    """That of M with its projection on the rows of A; of all such B it is the nearest, which small weights lead to."""
    b, a, products, target = problem(seed)
    found = corrected(b, a, products, 0.0, False)
    projected = target @ torch.linalg.pinv(a) @ a

    def cosine(one: Tensor) -> float:
        return float(F.cosine_similarity(one.flatten(), target.flatten(), 0))

    assert cosine(found @ a) == pytest.approx(cosine(projected), abs=1e-14)
    assert cosine(b @ a) < cosine(found @ a) - 1e-3
    best = target @ torch.linalg.pinv(a)
    assert_close(found, best * ((best * b).sum() / best.square().sum()), 1e-12)
    for squared in (True, False):
        near = [float((corrected(b, a, products, weight, squared) - found).norm()) for weight in (1e-4, 1e-6, 1e-8)]
        assert near[0] > near[1] > near[2] and near[2] < 1e-5


def test_inv_fair_4_with_a_large_weight_it_is_federated_averaging_to_the_bit() -> None:
    """Of the norm from a finite weight on; of its square in the limit."""
    held, plain = (low_rank_toy(method) for method in (LoRAFair(correction_weight=1e6), FedAvg()))
    squared = low_rank_toy(LoRAFair(correction_weight=1e12, penalty="squared"))
    for cohort in COHORTS:
        expected = plain.step(cohort)
        assert_equal(held.step(cohort), expected)
        assert_close(squared.step(cohort), expected, 1e-9)
    over_images, fedit = (adapted_toy(method) for method in (LoRAFair(correction_weight=1e6), FedAvg()))
    assert_equal(over_images.run(), fedit.run())


def test_inv_fair_5_one_client_and_equal_clients_are_not_corrected() -> None:
    """B A is the mean product then, so that the angle is zero, whatever the weight."""
    for weight in (0.0, 1e-3):
        for squared in (True, False):
            b, a, products, _ = problem(0, clients=1)
            assert_close(corrected(b, a, products, weight, squared), b, 1e-7)
            toy, plain = (low_rank_toy(one) for one in (LoRAFair(correction_weight=weight), FedAvg()))
            assert_close(toy.step([1]), plain.step([1]), 1e-7)


@pytest.mark.parametrize("squared", [True, False])
def test_inv_fair_6_the_basis_of_the_rank_and_the_size_of_the_target_do_not_matter(squared: bool) -> None:
    """(B Q^T, Q A) is the same product for an orthogonal Q, and only the direction of M counts."""
    b, a, (left, right), _ = problem(1)
    q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    found = corrected(b, a, (left, right), 0.05, squared)
    assert_close(corrected(b @ q.mT, q @ a, (left, right), 0.05, squared), found @ q.mT, 1e-11)
    assert_close(corrected(b, a, (7 * left, right), 0.05, squared), found, 1e-11)


def test_layers_without_an_angle_stay() -> None:
    """Where B, A or all products are zero; a row of A that is zero; one output; A with more rows than columns."""
    b, a, products, _ = problem(0)
    for weight in (0.0, 0.01):
        for squared in (True, False):
            options = (weight, squared)
            for zero in ((b * 0, a, products), (b, a * 0, products), (b, a, (products[0] * 0, products[1]))):
                assert torch.equal(corrected(*zero, *options), zero[0])
            dead = a.clone()
            dead[1] = 0
            found = corrected(b, dead, products, *options)
            assert bool(found.isfinite().all()) and not torch.equal(found, b)
            assert_close(found[:, 1], b[:, 1], 1e-9)
            for shape in ((1, 2, 6), (6, 5, 3), (1, 1, 1), (4, 1, 5)):
                b_, a_, products_, target_ = problem(2, *shape)
                found = corrected(b_, a_, products_, *options)
                before, after = (F.cosine_similarity((one @ a_).flatten(), target_.flatten(), 0) for one in (b_, found))
                assert found.shape == b_.shape and float(after) >= float(before) - 1e-12
    untrained = adapted_toy(LoRAFair(), train=low_rank_toy(LoRAFair()).train.model_copy(update={"lr": 0.0}))
    before = dict(untrained.server["model"])
    assert_equal(untrained.step([0, 1])["model"], before)


@pytest.mark.parametrize("penalty", ["norm", pytest.param("squared", marks=pytest.mark.slow)])
def test_stacked_is_looped_and_hosts_make_no_difference(penalty: Any) -> None:
    method = LoRAFair(penalty=penalty)
    one, other, many = adapted_toy(method), adapted_toy(method, "vectorized"), adapted_toy(method, hosts=3)
    found = one.run()
    assert_close(found, other.run(), 1e-4)
    assert_equal(found, many.run())
    assert {*one.scores()[0]} == {"global"}
    double, stacked = low_rank_toy(method), low_rank_toy(method, "vectorized")
    for cohort in COHORTS:
        assert_close(double.step(cohort), stacked.step(cohort), 1e-8)


def test_a_model_goes_each_way_and_clients_keep_nothing() -> None:
    toy = low_rank_toy(LoRAFair())
    size = num_bytes(toy.server["model"])
    for cohort in SEVERAL:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())


def test_newcomers_have_the_server_s_model() -> None:
    toy = adapted_toy(LoRAFair(), unseen=1)
    toy.run()
    assert set(toy.scores(newcomers=True)[3]) == {"global"}
