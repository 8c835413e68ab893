"""The losses of knowledge transfer: closed forms, invariances, and padding that must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from algorithms.parts.transfer import distillation, half_squared_distance, maximum_mean_discrepancy
from rayfl.tasks.base import Batch

torch.set_num_threads(1)

Loss = Callable[[Tensor, Tensor, Batch], Tensor]


def kd_code(student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    return distillation(student, teacher, batch, form="code")


LOSSES: dict[str, Loss] = {
    "kd": distillation,
    "kd_code": kd_code,
    "l2": half_squared_distance,
    "mmd": maximum_mean_discrepancy,
}
ONE_PAIR = 2 * sum(1 - math.exp(-(2.0 ** (2 - i))) for i in range(5))


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(size: int, mask: Tensor | None = None) -> Batch:
    return Batch(torch.zeros(size, 1, dtype=torch.float64), torch.zeros(size, dtype=torch.int64), mask)


def value_and_gradient(loss: Loss, student: Tensor, teacher: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    value = loss(leaf, teacher, batch)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def test_g4_distillation() -> None:
    teacher = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    student = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    value, gradient = value_and_gradient(distillation, student, teacher, batch_of(1))
    assert value.item() == pytest.approx(0.491104423533, abs=1e-9)
    assert gradient[0].tolist() == pytest.approx([-0.484627183720, 0.272446014378, 0.212181169342], abs=1e-9)
    value, gradient = value_and_gradient(kd_code, student, teacher, batch_of(1))
    assert value.item() == pytest.approx(1.089214577076, abs=1e-9)
    assert gradient[0].tolist() == pytest.approx([-0.058705465002, 0.130562834523, -0.071857369521], abs=1e-9)


def test_g5_maximum_mean_discrepancy() -> None:
    student = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    teacher = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    value = maximum_mean_discrepancy(student, teacher, batch_of(2))
    assert value.item() == pytest.approx(2.356389242430, abs=1e-9)
    assert pytest.approx(6.186276387838, abs=1e-9) == ONE_PAIR


def test_mmd_is_the_mean_over_the_blocks_of_the_kernel_matrix() -> None:
    """Written out as in the definition, with explicit differences instead of a matrix product."""
    student, teacher = rows(4, 3), rows(4, 3, seed=1) + 0.3
    stacked = torch.cat([student, teacher])
    distances = ((stacked[:, None] - stacked[None, :]) ** 2).sum(-1)
    bandwidth = distances.sum() / (8**2 - 8) + 1e-8
    kernel = sum(torch.exp(-distances / (bandwidth * 2.0 ** (i - 2))) for i in range(5))
    assert isinstance(kernel, Tensor)
    expected = (kernel[:4, :4] + kernel[4:, 4:] - kernel[:4, 4:] - kernel[4:, :4]).mean()
    torch.testing.assert_close(maximum_mean_discrepancy(student, teacher, batch_of(4)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_inv_php_6_distillation_gradient(temperature: float) -> None:
    student, teacher = rows(6, 4), rows(6, 4, seed=1)

    def loss(s: Tensor, t: Tensor, batch: Batch) -> Tensor:
        return distillation(s, t, batch, temperature)

    _, gradient = value_and_gradient(loss, student, teacher, batch_of(6))
    expected = temperature / 6 * ((student / temperature).softmax(-1) - (teacher / temperature).softmax(-1))
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_inv_php_6_distillation_vanishes_where_the_models_agree() -> None:
    logits = 3 * rows(6, 4)
    for shift in (0.0, 2.5):
        value, gradient = value_and_gradient(distillation, logits, logits + shift, batch_of(6))
        assert abs(value.item()) < 1e-12
        assert gradient.abs().max() < 1e-12
    _, gradient = value_and_gradient(kd_code, logits, logits, batch_of(6))
    expected = (logits.softmax(-1) - (logits / 4).softmax(-1)) / 6
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-3


def test_inv_php_6_distillation_at_high_temperature_matches_centred_logits() -> None:
    student, teacher = rows(6, 4), rows(6, 4, seed=1)
    value = distillation(student, teacher, batch_of(6), temperature=1e3)
    difference = (teacher - teacher.mean(-1, keepdim=True)) - (student - student.mean(-1, keepdim=True))
    expected = (difference**2).sum(-1).mean() / (2 * 4)
    assert value.item() == pytest.approx(expected.item(), rel=1e-2)


def test_l2_value_and_gradient() -> None:
    student, teacher = rows(5, 3), rows(5, 3, seed=1)
    value, gradient = value_and_gradient(half_squared_distance, student, teacher, batch_of(5))
    assert value.item() == pytest.approx(((student - teacher) ** 2).sum().item() / 10, abs=1e-12)
    torch.testing.assert_close(gradient, (student - teacher) / 5, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_inv_php_7_mmd_is_symmetric_and_bounded(seed: int) -> None:
    student, teacher = rows(7, 3, seed=seed), (seed + 1) * rows(7, 3, seed=seed + 50) + seed
    value = maximum_mean_discrepancy(student, teacher, batch_of(7)).item()
    assert value == pytest.approx(maximum_mean_discrepancy(teacher, student, batch_of(7)).item(), abs=1e-12)
    assert 0 < value <= 10


def test_inv_php_7_mmd_of_distant_sets_stays_bounded() -> None:
    value = maximum_mean_discrepancy(rows(7, 3), rows(7, 3, seed=1) + 1e6, batch_of(7)).item()
    assert 5 < value <= 10


def test_inv_php_7_mmd_vanishes_on_equal_multisets() -> None:
    student = rows(7, 3) + 5
    value, gradient = value_and_gradient(maximum_mean_discrepancy, student, student.roll(3, 0), batch_of(7))
    assert abs(value.item()) < 1e-12
    assert gradient.abs().max() < 1e-12
    other, _ = value_and_gradient(maximum_mean_discrepancy, student, student + 0.1, batch_of(7))
    assert other > 1e-4


@pytest.mark.parametrize("level", [0.0, 3.7])
def test_inv_php_7_mmd_of_collapsed_features_is_zero_and_finite(level: float) -> None:
    """All activations dead: no distance at all, the bandwidth is its floor."""
    same = torch.full((6, 3), level, dtype=torch.float64)
    value, gradient = value_and_gradient(maximum_mean_discrepancy, same, same.clone(), batch_of(6))
    assert abs(value.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


def test_inv_php_7_mmd_ignores_common_motions_and_scales() -> None:
    student, teacher = rows(7, 3), rows(7, 3, seed=1) + 0.5
    rotation, _ = torch.linalg.qr(rows(3, 3, seed=2))
    expected = maximum_mean_discrepancy(student, teacher, batch_of(7))
    moved = maximum_mean_discrepancy(student @ rotation + 2, teacher @ rotation + 2, batch_of(7))
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-10)
    scaled = maximum_mean_discrepancy(30 * student, 30 * teacher, batch_of(7))
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-7)
    alone = maximum_mean_discrepancy(30 * student, teacher, batch_of(7))
    assert abs(alone - expected) > 1e-2


def mmd_of_the_paper(student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    return maximum_mean_discrepancy(student, teacher, batch, "paper")


@pytest.mark.parametrize("distance", [0.5, 2.0, 70.0])
def test_inv_php_7_mmd_of_one_pair_is_a_constant_whose_gradient_has_no_bound(distance: float) -> None:
    """Of the estimate as it is: with the bandwidth held, the gradient's length is 4.84 over the distance."""
    student = rows(1, 3)
    teacher = student + distance / 3**0.5
    value, gradient = value_and_gradient(mmd_of_the_paper, student, teacher, batch_of(1))
    assert value.item() == pytest.approx(ONE_PAIR, abs=1e-6)
    assert gradient.norm().item() == pytest.approx(4.84 / distance, rel=0.01)


@pytest.mark.parametrize("distance", [0.0, 1e-12, 0.5, 70.0])
@pytest.mark.parametrize("padding", [None, 0.0, 1e6])
def test_one_sample_a_side_has_no_discrepancy(padding: float | None, distance: float) -> None:
    student = rows(1, 3)
    teacher, batch = student + distance, batch_of(1)
    if padding is not None:
        filler = torch.full((2, 3), padding, dtype=torch.float64)
        student, teacher = torch.cat([student, filler]), torch.cat([teacher, -filler])
        batch = batch_of(3, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    value, gradient = value_and_gradient(maximum_mean_discrepancy, student, teacher, batch)
    assert value.item() == 0
    assert torch.equal(gradient, torch.zeros_like(student))


@pytest.mark.parametrize("count", [2, 5])
def test_of_two_samples_on_the_option_changes_nothing(count: int) -> None:
    student, teacher, batch = rows(count, 3), rows(count, 3, seed=1), batch_of(count)
    assert torch.equal(maximum_mean_discrepancy(student, teacher, batch), mmd_of_the_paper(student, teacher, batch))


def test_inv_php_7_mmd_gradient_treats_the_bandwidth_as_a_constant() -> None:
    """With the bandwidth part of the gradient, scale invariance would make <gradient, student> vanish at teacher 0."""
    student, teacher = rows(5, 3), torch.zeros(5, 3, dtype=torch.float64)
    _, gradient = value_and_gradient(maximum_mean_discrepancy, student, teacher, batch_of(5))
    assert abs((gradient * student).sum()) > 1e-2

    stacked = torch.cat([student, teacher])
    bandwidth = ((stacked[:, None] - stacked[None, :]) ** 2).sum() / 90 + 1e-8

    def fixed(s: Tensor, t: Tensor, batch: Batch) -> Tensor:
        both = torch.cat([s, t])
        distances = ((both[:, None] - both[None, :]) ** 2).sum(-1)
        signs = torch.tensor([0.2] * 5 + [-0.2] * 5, dtype=torch.float64)
        kernel = torch.stack([torch.exp(-distances / (bandwidth * 2.0**i)) for i in range(-2, 3)]).sum(0)
        return signs @ kernel @ signs

    _, expected = value_and_gradient(fixed, student, teacher, batch_of(5))
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("padding", [0.0, 1e6])
def test_padded_rows_do_not_count(name: str, padding: float) -> None:
    student, teacher = rows(5, 4), rows(5, 4, seed=1)
    value, gradient = value_and_gradient(LOSSES[name], student, teacher, batch_of(5))
    filler = torch.full((3, 4), padding, dtype=torch.float64)
    mask = torch.tensor([1.0] * 5 + [0.0] * 3, dtype=torch.float64)
    padded, padded_gradient = value_and_gradient(
        LOSSES[name], torch.cat([student, filler]), torch.cat([teacher, -filler]), batch_of(8, mask)
    )
    torch.testing.assert_close(padded, value, rtol=0, atol=1e-12)
    torch.testing.assert_close(padded_gradient[:5], gradient, rtol=0, atol=1e-12)
    assert torch.equal(padded_gradient[5:], torch.zeros_like(filler))


@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e200])
def test_mmd_survives_padding_that_is_not_finite(padding: float) -> None:
    student, teacher = rows(5, 4), rows(5, 4, seed=1)
    value, gradient = value_and_gradient(maximum_mean_discrepancy, student, teacher, batch_of(5))
    filler = torch.full((2, 4), padding, dtype=torch.float64)
    mask = torch.tensor([1.0] * 5 + [0.0] * 2, dtype=torch.float64)
    padded, padded_gradient = value_and_gradient(
        maximum_mean_discrepancy, torch.cat([student, filler]), torch.cat([teacher, filler]), batch_of(7, mask)
    )
    torch.testing.assert_close(padded, value, rtol=0, atol=1e-12)
    torch.testing.assert_close(padded_gradient[:5], gradient, rtol=0, atol=1e-12)
    assert torch.equal(padded_gradient[5:], torch.zeros_like(filler))


@pytest.mark.parametrize("name", LOSSES)
def test_stacked_clients_give_the_gradients_of_each(name: str) -> None:
    student, teacher = rows(3, 5, 4), rows(3, 5, 4, seed=1)
    mask = torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2, [1.0] + [0.0] * 4], dtype=torch.float64)

    def of_client(s: Tensor, t: Tensor, m: Tensor) -> Tensor:
        return LOSSES[name](s, t, batch_of(5, m))

    stacked = vmap(grad(of_client))(student, teacher, mask)
    for k in range(3):
        valid = int(mask[k].sum())
        _, expected = value_and_gradient(LOSSES[name], student[k, :valid], teacher[k, :valid], batch_of(valid))
        torch.testing.assert_close(stacked[k, :valid], expected, rtol=0, atol=1e-12)


def test_mmd_in_single_precision_far_from_the_origin() -> None:
    """Activations have a large common mean; the matrix product must not lose their distances to it."""
    student, teacher = rows(16, 8), rows(16, 8, seed=1) + 0.5
    exact = maximum_mean_discrepancy(student, teacher, batch_of(16)).item()
    single = maximum_mean_discrepancy((student + 1000).float(), (teacher + 1000).float(), batch_of(16)).item()
    assert single == pytest.approx(exact, rel=1e-3)
