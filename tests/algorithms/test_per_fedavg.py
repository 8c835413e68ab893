"""Per-FedAvg: invariants PFA, mini-batches in parts, the personalized model, running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.per_fedavg import PerFedAvg
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, map_leaves
from rayfl.tasks.base import Batch, begin_step
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import (
    DoubleNetwork,
    NormalizedLayers,
    Quadratic,
    SoftmaxRegression,
    normalized_layers,
    two_layers,
)
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients

VERSIONS: tuple[Any, ...] = ("fo", "hf", "exact")
SIZES = (9, 13, 7, 11)
TRAIN = TrainConfig(rounds=3, clients_per_round=3, local_epochs=2, batch_size=6, lr=0.1)


class OnPart(FedAvg):
    """Federated averaging on one part of every mini-batch."""

    count: int = 2

    def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:  # type: ignore[override]
        return task.loss(model, batch.parts(self.count)[1])  # type: ignore[no-any-return]


def gradient(algorithm: PerFedAvg, model: Tree, batch: Batch, task: Any) -> Tree:
    """The gradient of the objective."""
    moved = map_leaves(lambda leaf: leaf.clone().requires_grad_(), model)
    value = algorithm.objective(moved, batch, task, None, None)
    return dict(zip(moved, torch.autograd.grad(value, list(moved.values())), strict=True))


def sample(size: int = 6, seed: int = 0) -> Batch:
    x, y = (random_clients([size], seed=seed).load(0)["train"].x, random_clients([size], seed=seed).load(0)["train"].y)
    return Batch(x, y)


def hessian_product(task: Any, model: Tree, batch: Batch, direction: Tree) -> Tree:
    """Hess f(x) v, forward over reverse."""
    _, found = torch.func.jvp(torch.func.grad(lambda m: task.loss(m, batch)), (dict(model),), (dict(direction),))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_pfa_1_without_an_inner_step_it_is_fedavg_on_the_second_part(version: Any, mode: str) -> None:
    meta = Toy(PerFedAvg(version=version, alpha=0), random_clients(SIZES), two_layers(), TRAIN, mode=mode)
    count = 3 if version == "hf" else 2
    plain = Toy(OnPart(aggregation="uniform", count=count), random_clients(SIZES), two_layers(), TRAIN, mode=mode)
    same = assert_close if version == "hf" else assert_equal
    for _ in range(TRAIN.rounds):
        same(meta.step(), plain.step())


@pytest.mark.parametrize(("version", "expected"), [("fo", 1.16), ("hf", 1.128), ("exact", 1.128)])
@pytest.mark.parametrize("delta", [1e-3, 0.5])
def test_inv_pfa_2_one_step_on_quadratics(version: Any, expected: float, delta: float) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=6, lr=0.1)
    toy = Toy(PerFedAvg(version=version, alpha=0.2, delta=delta), quadratic_clients([3], [6]), Quadratic(), train)
    assert toy.step()["model"]["theta"].item() == pytest.approx(expected, abs=1e-12)


def test_inv_pfa_3_exact_is_the_hessian_product() -> None:
    task, batch, alpha = two_layers(), sample(), 0.3
    model = task.network.initialize(1)
    first, second = batch.parts(2)
    step = torch.func.grad(lambda m: task.loss(m, first))(model)
    v = torch.func.grad(lambda m: task.loss(m, second))(add_scaled(model, step, -alpha))
    expected = add_scaled(v, hessian_product(task, model, first, v), -alpha)
    assert_close(gradient(PerFedAvg(version="exact", alpha=alpha), model, batch, task), expected, 1e-14)
    assert_close(gradient(PerFedAvg(version="fo", alpha=alpha), model, batch, task), v, 1e-14)


def test_inv_pfa_4_the_difference_of_gradients_is_of_second_order() -> None:
    class Smooth(SoftmaxRegression):
        def features(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    task, alpha = Classification(DoubleNetwork(lambda: Smooth())), 0.5
    model = task.network.initialize(1)
    # three equal parts: D'' = D = D'
    one = sample(4)
    batch = Batch(one.x.repeat(3, 1), one.y.repeat(3))
    step = torch.func.grad(lambda m: task.loss(m, one))(model)
    v = torch.func.grad(lambda m: task.loss(m, one))(add_scaled(model, step, -alpha))
    expected = add_scaled(v, hessian_product(task, model, one, v), -alpha)
    errors = []
    for delta in (1e-2, 1e-3):
        found = gradient(PerFedAvg(version="hf", alpha=alpha, delta=delta), model, batch, task)
        errors.append(max(float((found[name] - expected[name]).abs().max()) for name in found))
    assert 95 < errors[0] / errors[1] < 105


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("batch_size", [6, 4, 2, 1])
def test_inv_pfa_5_looped_and_vectorized_agree_on_ragged_batches(version: Any, batch_size: int) -> None:
    train = TRAIN.model_copy(update={"batch_size": batch_size, "momentum": 0.5})
    looped, stacked = (
        Toy(PerFedAvg(version=version, alpha=0.2), random_clients((9, 1, 7, 2)), two_layers(), train, mode=mode)
        for mode in ("looped", "vectorized")
    )
    for _ in range(2):
        assert_close(looped.step([0, 1, 2, 3]), stacked.step([0, 1, 2, 3]), 1e-12)


def test_inv_pfa_6_of_a_quadratic_loss_hf_is_exact_for_any_delta() -> None:
    class Linear:
        """Squared loss of a linear model."""

        network = Quadratic(3).network

        def loss(self, model: Tree, batch: Batch) -> Tensor:
            return batch.mean((batch.x @ model["theta"] - batch.y) ** 2)

    task, alpha = Linear(), 0.1
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(6, 3, dtype=torch.float64, generator=generator), torch.arange(6))
    model = {"theta": torch.randn(3, dtype=torch.float64, generator=generator)}
    first, second, third = batch.parts(3)
    step = torch.func.grad(lambda m: task.loss(m, first))(model)
    v = torch.func.grad(lambda m: task.loss(m, second))(add_scaled(model, step, -alpha))
    expected = add_scaled(v, hessian_product(task, model, third, v), -alpha)
    for delta in (1e-3, 1.0):
        found = gradient(PerFedAvg(version="hf", alpha=alpha, delta=delta), model, batch, task)
        assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("batch", ["full", "batch"])
def test_inv_pfa_7_the_personalized_model_is_one_gradient_step(batch: Any) -> None:
    def evaluated(**options: Any) -> dict[int, dict[str, Any]]:
        toy = Toy(PerFedAvg(adapt_batch=batch, **options), quadratic_clients([3, -1], [4, 4]), Quadratic(), TRAIN)
        models: dict[int, dict[str, Any]] = {}
        for client in range(2):
            found = toy.federation.map(toy.algorithm.adapted, [client], {"model": toy.server["model"]})  # type: ignore[attr-defined]
            models[client] = found[client]
        return models

    for client, point in enumerate((3.0, -1.0)):
        assert evaluated(alpha=0.0)[client]["theta"].item() == 1
        assert evaluated(alpha=0.25)[client]["theta"].item() == pytest.approx(1 - 0.25 * (1 - point))
        twice = 1 - 0.25 * (1 - point)
        twice -= 0.25 * (twice - point)
        # a mini-batch of the quadratic's equal samples has the gradient of all of them
        assert evaluated(alpha=0.25, adapt_steps=2)[client]["theta"].item() == pytest.approx(twice)
        assert evaluated(alpha=0.25, adapt_steps=0)[client]["theta"].item() == 1


def test_a_client_without_training_samples_has_the_servers_model() -> None:
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])

    class Unfed(ListDataset):
        def sizes(self) -> Any:
            sizes = super().sizes()
            sizes[1, 0] = 0
            return sizes

        def load(self, client: int) -> Any:
            found = dict(super().load(client))
            return found if client == 0 else {**found, "train": found["validation"]}

    toy = Toy(PerFedAvg(alpha=0.5), Unfed([(x, y), (x, y)]), two_layers(), TRAIN)
    scores = toy.scores()
    assert scores[1]["personalized"].vector.tolist() == scores[1]["global"].vector.tolist()
    assert scores[0]["personalized"].loss < scores[0]["global"].loss


@pytest.mark.parametrize("version", VERSIONS)
def test_running_statistics_are_recorded_once_a_step(version: Any) -> None:
    """And by the pass at the adapted point on D'."""
    task = normalized_layers()
    model, batch = task.network.initialize(0), sample(9)
    before = copy(model)
    algorithm = PerFedAvg(version=version, alpha=0.1)
    moved = {n: leaf.requires_grad_(n in task.network.parameter_names) for n, leaf in model.items()}
    torch.autograd.grad(
        algorithm.objective(moved, batch, task, None, None), [moved[n] for n in task.network.parameter_names]
    )
    first, second, *_ = batch.parts(3 if version == "hf" else 2)
    expected = map_leaves(lambda leaf: leaf.clone(), before)
    again = {n: leaf.detach().requires_grad_(n in task.network.parameter_names) for n, leaf in copy(before).items()}
    names = task.network.parameter_names
    step = torch.autograd.grad(task.loss(again, first), [again[n] for n in names])
    expected |= {n: expected[n] - 0.1 * g for n, g in zip(names, step, strict=True)}
    task.loss(expected, second)
    for name in task.network.buffer_names:
        assert torch.equal(model[name], expected[name])
        assert not torch.equal(model[name], before[name])


def test_adaptation_by_mini_batches_needs_sgd() -> None:
    train = TRAIN.model_copy(update={"optimizer": "adam"})
    toy = Toy(PerFedAvg(adapt_batch="batch"), random_clients(SIZES), two_layers(), train)
    with pytest.raises(ConfigError, match=r"train\.optimizer=sgd"):
        toy.algorithm.check(toy.task, toy.context)
    PerFedAvg().check(toy.task, toy.context)


@pytest.mark.slow
def test_learning_to_adapt_beats_adapting_the_mean() -> None:
    """With clients of two curvatures the best initial model is nearer to those that adapt less."""
    train = TrainConfig(rounds=100, clients_per_round="all", local_epochs=1, batch_size=6, lr=0.5)

    class Curved(Quadratic):
        def loss(self, model: Any, batch: Batch) -> Tensor:
            curvature = torch.where(batch.x[:, 0] > 0, 1.0, 4.0)
            return batch.mean(0.5 * curvature * ((model["theta"] - batch.x) ** 2).sum(-1))

    toy = Toy(PerFedAvg(version="exact", alpha=0.2), quadratic_clients([1, -1], [6, 6]), Curved(), train)
    # the minimiser of sum_k c_k (1 - 0.2 c_k)^2 (w - a_k)^2
    weights = [1 * 0.8**2, 4 * 0.2**2]
    assert toy.run()["model"]["theta"].item() == pytest.approx((weights[0] - weights[1]) / sum(weights), abs=1e-6)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.LayerNorm])
def test_exact_of_a_normalized_network_is_the_same_for_stacked_clients(layer: Any) -> None:
    class Own(NormalizedLayers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layer(7)

    def trained(mode: str) -> Tree:
        task = Classification(DoubleNetwork(Own))
        return Toy(PerFedAvg(version="exact", alpha=0.2), random_clients([12] * 4), task, TRAIN, mode=mode).run(1)

    assert_close(trained("vectorized"), trained("looped"), 1e-12)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_parts_of_a_padded_mini_batch_are_those_of_the_plain_one(size: int, count: int, least: int) -> None:
    x, y = torch.arange(7.0)[:, None], torch.arange(7)
    plain = Batch(x[:size], y[:size]).parts(count, least)
    padded = Batch(x, y, (torch.arange(7) < size).double()).parts(count, least)
    assert len(plain) == len(padded) == count
    sizes = [len(part.y) for part in plain]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [size] * count if size < count * least else sum(sizes) == size and min(sizes) >= least
    for one, other in zip(plain, padded, strict=True):
        kept = other.mask > 0  # type: ignore[operator]
        assert other.y[kept].tolist() == one.y.tolist()
        assert other.x[kept].tolist() == one.x.tolist()
        assert float(other.mean(other.y.double())) == float(one.mean(one.y.double()))


def test_both_ends_of_the_finite_difference_have_the_same_dropout() -> None:
    """Else their difference, divided by delta, would be noise without bound."""
    task = normalized_layers(0.5)
    model = task.network.initialize(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    batch = Batch(x, torch.randint(3, (12,), generator=generator))
    found = []
    for delta in (1e-3, 1e-4):
        method = PerFedAvg(version="hf", alpha=0.1, delta=delta)
        begin_step(task, torch.tensor(7))
        found.append(method.objective(model, batch, task, None, None).item())
    assert found[0] == pytest.approx(found[1], rel=1e-2)
