"""SuPerFed's objective: gradients of both ends, mixing, and the penalties."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.superfed import SuPerFed
from rayfl.examples import InputSpec
from rayfl.models.zoo import CharLSTM
from rayfl.objectives.points import Scope
from rayfl.objectives.terms import Loss
from rayfl.params import Tree, copy, squared_cosine
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.superfed_toys import FREE, MODES, models, normed, some_batch
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import distance


def gradients(algorithm: SuPerFed, federated: Tree, local: Tree, received: Tree, coefficient: Any) -> tuple[Tree, Tree]:
    """dL/df and dL/dl of the second phase's objective."""
    ends = [{name: leaf.clone().requires_grad_() for name, leaf in end.items()} for end in (federated, local)]
    draw = {"coefficient": torch.as_tensor(coefficient, dtype=torch.float64)}
    loss = algorithm.objective(
        {"federated": ends[0], "local": ends[1]}, some_batch(), two_layers(), {"received": received}, draw
    )
    flat = torch.autograd.grad(loss, [leaf for end in ends for leaf in end.values()], allow_unused=False)
    names = list(federated)
    return dict(zip(names, flat[: len(names)], strict=True)), dict(zip(names, flat[len(names) :], strict=True))


def mixed_model(algorithm: SuPerFed, federated: Tree, local: Tree, coefficients: list[float], task: Any) -> Tree:
    """The model at which the loss is taken."""
    scope = Scope({"federated": federated, "local": local}, task, None, {"coefficient": torch.tensor(coefficients)})
    mixed_loss = algorithm.objective.terms[0][1]
    assert isinstance(mixed_loss, Loss)
    return mixed_loss.at.model(scope)


def gradient_of_mixed(federated: Tree, local: Tree, of_name: dict[str, float]) -> Tree:
    """dCE/dW at the mixed model, written out."""
    mixed = {n: ((1 - of_name[n]) * federated[n] + of_name[n] * local[n]).requires_grad_() for n in federated}
    loss = two_layers().loss(mixed, some_batch())
    return dict(zip(mixed, torch.autograd.grad(loss, list(mixed.values())), strict=True))


def coefficients_for(mode: str) -> tuple[Any, dict[str, float]]:
    """A draw, and the coefficient it gives each parameter of two layers."""
    if mode == "mm":
        return 0.3, dict.fromkeys(two_layers().network.parameter_names, 0.3)
    return [0.3, 0.8], {"inner.weight": 0.3, "inner.bias": 0.3, "head.weight": 0.8, "head.bias": 0.8}


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.values()])


def like(tree: Tree, vector: Tensor) -> Tree:
    parts = vector.split([leaf.numel() for leaf in tree.values()])
    return {name: part.view_as(leaf) for (name, leaf), part in zip(tree.items(), parts, strict=True)}


def penalty_gradient(one: Tensor, other: Tensor) -> Tensor:
    """The closed form of the gradient of cos^2 with respect to ``one``."""
    cosine = (one @ other) / (one.norm() * other.norm())
    return 2 * cosine / one.norm() * (other / other.norm() - cosine * one / one.norm())


def cosine_gradients(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ends = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    value = squared_cosine({"w": ends[0]}, {"w": ends[1]})
    one, other = torch.autograd.grad(value, ends)
    return value.detach(), one, other


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_3_partition_of_unity(mode: str) -> None:
    federated, local, received = models(two_layers(), 3)
    draw, of_name = coefficients_for(mode)
    gradient = gradient_of_mixed(federated, local, of_name)
    of_federated, of_local = gradients(SuPerFed(mode=mode, **FREE), federated, local, received, draw)
    for name, value in gradient.items():
        torch.testing.assert_close(of_federated[name] + of_local[name], value, rtol=0, atol=1e-15)
        torch.testing.assert_close(of_federated[name], (1 - of_name[name]) * value, rtol=0, atol=1e-15)
        torch.testing.assert_close(of_local[name], of_name[name] * value, rtol=0, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alignment", [0.0, 0.7, 1.0])
def test_inv_sf_4_closed_forms_of_both_gradients(mode: str, alignment: float) -> None:
    federated, other, received = models(two_layers(), 3)
    local = {name: alignment * federated[name] + (1 - alignment) * other[name] for name in federated}
    draw, of_name = coefficients_for(mode)
    gradient = gradient_of_mixed(federated, local, of_name)
    algorithm = SuPerFed(mode=mode, orthogonality_weight=1.7, proximal_weight=0.6)
    of_federated, of_local = gradients(algorithm, federated, local, received, draw)
    repelling = like(federated, 1.7 * penalty_gradient(flat(federated), flat(local)))
    repelled = like(local, 1.7 * penalty_gradient(flat(local), flat(federated)))
    for name, value in gradient.items():
        expected = (1 - of_name[name]) * value + 1.2 * (federated[name] - received[name]) + repelling[name]
        torch.testing.assert_close(of_federated[name], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(of_local[name], of_name[name] * value + repelled[name], rtol=0, atol=1e-10)


def test_first_phase_objective_is_cross_entropy_and_proximity_alone() -> None:
    federated, received = models(two_layers(), 2)
    algorithm = SuPerFed(orthogonality_weight=5.0, proximal_weight=0.6)
    client = mock.AsyncMock(round=0, context=mock.Mock(rounds=10), publish=mock.Mock(), num_samples=1)
    client.train.return_value = {"federated": federated}
    asyncio.run(algorithm.local_update(client, received))
    (start, objective), options = client.train.call_args
    assert start == {"federated": received}
    assert options == {"frozen": {"received": received}}
    loss = objective({"federated": federated}, some_batch(), two_layers(), options["frozen"], None)
    expected = two_layers().loss(federated, some_batch()) + 0.6 * ((flat(federated) - flat(received)) ** 2).sum()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_g3_squared_cosine() -> None:
    first = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    second = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)
    value, of_first, of_second = cosine_gradients(first, second)
    assert value.item() == pytest.approx(0.197530864198, abs=1e-9)
    assert of_first.tolist() == pytest.approx([0.153635116598, -0.186556927298, 0.109739368999], abs=1e-9)
    assert of_second.tolist() == pytest.approx([0.010973936900, 0.241426611797, 0.109739368999], abs=1e-9)
    assert of_first.norm().item() == pytest.approx(0.265424123401, abs=1e-9)


def test_squared_cosine_takes_all_tensors_as_one_vector() -> None:
    first, second = models(two_layers(), 2)
    expected = (flat(first) @ flat(second)) ** 2 / (flat(first).norm() * flat(second).norm()) ** 2
    torch.testing.assert_close(squared_cosine(first, second), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_inv_sf_5_geometry_of_the_penalty(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(9, generator=generator, dtype=torch.float64)
    second = torch.randn(9, generator=generator, dtype=torch.float64)
    value, of_first, of_second = cosine_gradients(first, second)
    assert abs(of_first @ first) < 1e-13
    assert abs(of_second @ second) < 1e-13
    cosine = value.sqrt()
    expected = 2 * cosine * (1 - cosine**2).sqrt() / first.norm()
    assert of_first.norm().item() == pytest.approx(expected.item(), abs=1e-12)
    scaled, of_scaled, _ = cosine_gradients(5 * first, second)
    torch.testing.assert_close(scaled, value, rtol=0, atol=1e-14)
    torch.testing.assert_close(of_scaled, of_first / 5, rtol=0, atol=1e-14)
    stepped, _, _ = cosine_gradients(first - 0.01 * of_first, second - 0.01 * of_second)
    assert stepped < value


def test_inv_sf_5_the_penalty_vanishes_only_where_models_are_parallel_or_orthogonal() -> None:
    first = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    orthogonal = torch.tensor([2.0, 1.0, -2.0], dtype=torch.float64)
    for second, level in ((3 * first, 1.0), (-first, 1.0), (orthogonal, 0.0)):
        value, of_first, of_second = cosine_gradients(first, second)
        assert value.item() == pytest.approx(level, abs=1e-14)
        assert of_first.abs().max() < 1e-14
        assert of_second.abs().max() < 1e-14
    _, of_first, _ = cosine_gradients(first, first + orthogonal)
    assert of_first.norm() > 0.1


def test_a_model_of_zeros_has_no_angle_and_no_nan() -> None:
    value, of_first, of_second = cosine_gradients(torch.zeros(3, dtype=torch.float64), torch.ones(3).double())
    assert value == 0
    assert torch.equal(of_first, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(of_second, torch.zeros(3, dtype=torch.float64))


def test_layers_of_lm_share_one_coefficient_between_weight_and_bias() -> None:
    task = normed()
    federated, local = models(task, 2)
    mixed = mixed_model(SuPerFed(mode="lm"), federated, local, [0.0, 1.0, 0.25], task)
    for name, leaf in mixed.items():
        ends = (federated[name], local[name])
        expected = {
            "inner": ends[0],
            "norm": ends[1] if name in task.network.parameter_names else ends[0],
            "head": 0.75 * ends[0] + 0.25 * ends[1],
        }[name.split(".")[0]]
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-15)
    assert list(mixed) == list(federated)


def test_stacked_recurrent_layers_share_a_coefficient_unless_taken_apart() -> None:
    task = Classification(CharLSTM(embedding=3, hidden=4, layers=2).network(InputSpec("tokens", (5,), 7, vocabulary=7)))
    federated, local = models(task, 2)
    names = {"embedding.weight": "embedding", "head.weight": "head", "head.bias": "head"}
    for apart, coefficients, shares in (
        (False, [0.0, 0.25, 1.0], {"embedding": 0.0, "l0": 0.25, "l1": 0.25, "head": 1.0}),
        (True, [0.0, 0.25, 0.75, 1.0], {"embedding": 0.0, "l0": 0.25, "l1": 0.75, "head": 1.0}),
    ):
        mixed = mixed_model(SuPerFed(mode="lm", lm_lstm_per_layer=apart), federated, local, coefficients, task)
        for name, leaf in mixed.items():
            share = shares[names.get(name, name.rpartition("_")[2])]
            torch.testing.assert_close(leaf, (1 - share) * federated[name] + share * local[name])


def test_inv_sf_12_hessian_on_quad() -> None:
    """The expectation over lambda by Gauss's rule, exact for these polynomials of degree 2."""
    nodes, weights = np.polynomial.legendre.leggauss(3)
    batch = Batch(torch.tensor([[3.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    algorithm, task, frozen = SuPerFed(**FREE), Quadratic(), {"received": {"theta": torch.zeros(1).double()}}

    def expected_loss(ends: Tensor) -> Tensor:
        tree = {"federated": {"theta": ends[:1]}, "local": {"theta": ends[1:]}}
        parts = [
            weight / 2 * algorithm.objective(tree, batch, task, frozen, {"coefficient": torch.tensor((node + 1) / 2)})
            for node, weight in zip(nodes, weights, strict=True)
        ]
        return torch.stack(parts).sum()

    optimum = torch.tensor([3.0, 3.0], dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(expected_loss, torch.tensor([-0.5, 2.0], dtype=torch.float64))
    expected = torch.tensor([[1 / 3, 1 / 6], [1 / 6, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(hessian, expected, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(hessian).tolist() == pytest.approx([1 / 6, 1 / 2], abs=1e-12)
    slope = torch.autograd.functional.jacobian(expected_loss, optimum)
    assert slope.abs().max() < 1e-14


def test_penalties_leave_buffers_out() -> None:
    task = normed()
    federated, local, received = models(task, 3)
    algorithm = SuPerFed(orthogonality_weight=1.0, proximal_weight=0.5)
    values = []
    for shift in (0.0, 10.0):
        moved = {n: leaf + shift if n in task.network.buffer_names else leaf for n, leaf in received.items()}
        ends = {"federated": copy(federated), "local": {**local, **{n: moved[n] for n in task.network.buffer_names}}}
        draw = {"coefficient": torch.tensor(0.4, dtype=torch.float64)}
        values.append(algorithm.objective(ends, some_batch(), task, {"received": moved}, draw))
    assert torch.equal(values[0], values[1])


def test_norm_per_layer_sums_the_unsquared_norms_of_weights() -> None:
    federated, local, received = models(two_layers(), 3)
    algorithm = SuPerFed(orthogonality_weight=0.0, proximal_weight=0.6, proximal_form="norm_per_layer")
    with_penalty, _ = gradients(algorithm, federated, local, received, 0.3)
    without, _ = gradients(SuPerFed(**FREE), federated, local, received, 0.3)
    at_anchor, _ = gradients(algorithm, received, local, received, 0.3)
    at_anchor_without, _ = gradients(SuPerFed(**FREE), received, local, received, 0.3)
    for name in federated:
        step = federated[name] - received[name]
        pull = 0.6 * step / step.norm() if name.endswith("weight") else torch.zeros_like(step)
        torch.testing.assert_close(with_penalty[name] - without[name], pull, rtol=0, atol=1e-12)
        assert torch.equal(at_anchor[name], at_anchor_without[name])


def test_norm_per_layer_knows_the_weights_of_recurrent_layers() -> None:
    model = {name: torch.ones(4) for name in ("lstm.weight_ih_l0", "lstm.weight_hh_l1", "lstm.bias_ih_l0", "head.bias")}
    anchor = {name: torch.zeros(4) for name in model}
    assert distance("norm_per_layer", model, anchor) == 4.0
