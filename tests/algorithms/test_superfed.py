"""SuPerFed: the line between federated and local model, its penalties, and its phases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.base import Averaging
from algorithms.fedavg import FedAvg
from algorithms.proximity import penalty
from algorithms.superfed import GRID, SuPerFed, squared_cosine
from rayfl.aggregation import Weighted
from rayfl.engine.client import Client, RoundContext
from rayfl.engine.engine import Engine
from rayfl.engine.requests import TrainRequest
from rayfl.engine.settings import TrainConfig
from rayfl.engine.trampoline import run_procedures
from rayfl.params import Tree, copy, squared_distance
from rayfl.randomness import RandomStreams
from rayfl.tasks import Batch, Classification, Predictor
from tests.toys import (
    CPU,
    Quadratic,
    Toy,
    assert_close,
    assert_equal,
    normalized_layers,
    quadratic_clients,
    random_clients,
    softmax_regression,
    two_layers,
)

SIZES = (20, 13, 10, 19)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-3
)
NO_DECAY = TRAIN.model_copy(update={"weight_decay": 0.0})
MODES = ("mm", "lm")
FREE = {"orthogonality_weight": 0.0, "proximal_weight": 0.0}


class Proximal(Averaging):
    """A reference: federated averaging near the received model."""

    name: str = "proximal"
    weight: float

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return self.weighted(client, await client.train(model, self.objective, frozen={"received": model}))

    def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model, batch)
        return loss + self.weight / 2 * squared_distance(model, frozen["received"])


class LocalOnly(Averaging):
    """A reference: every client trains its own second model whenever it is sampled."""

    name: str = "local"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        client.state["local"] = await client.train(client.state.get("local") or client.fresh_model(), self.objective)
        return Weighted(model)


def toy(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def normed() -> Classification:
    return normalized_layers()


def history(run: Toy) -> dict[int, Tree]:
    return {round: copy(run.step()["model"]) for round in range(run.train.rounds)}


def client_of(run: Toy, id: int, round: int = 0) -> Client:
    """A client outside of a host, with its present state."""
    context = RoundContext(round, run.train.rounds, len(SIZES), run.train, RandomStreams(run.seed))
    return Client(id, run.states().get(id, {}), run.dataset.load(id), run.task, context, CPU)


def rows_of(run: Toy, id: int, round: int) -> dict[str, Predictor]:
    """The predictors of a client."""
    engine = run.federation._pool.hosts[0].engine  # type: ignore[attr-defined]
    procedure = run.algorithm.predictors(client_of(run, id, round), run.server)
    rows: dict[str, Predictor] = run_procedures({id: procedure}, engine)[id]
    return rows


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


def models(task: Any, count: int) -> list[Tree]:
    return [task.network.initialize(seed) for seed in range(1, count + 1)]


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
@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_inv_sf_1_at_coefficient_zero_it_is_federated_averaging(mode: str, start: float) -> None:
    for make in (two_layers, normed):
        reference = history(toy(FedAvg(), task=make()))
        algorithm = SuPerFed(mode=mode, start=start, fixed_coefficient=0.0, **FREE)
        assert_equal(history(toy(algorithm, task=make())), reference)


def test_inv_sf_1_the_first_phase_does_not_touch_the_local_model() -> None:
    run = toy(SuPerFed(start=1.0, local_init="copy", orthogonality_weight=2.0))
    received: dict[int, Tree] = {}
    for round in range(4):
        for client in run.cohort(round):
            received.setdefault(client, copy(run.server["model"]))
        run.step()
    assert_equal({client: state["local"] for client, state in run.states().items()}, received)
    unseen = toy(SuPerFed(start=1.0))
    unseen.run()
    assert unseen.states() == {}


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_1_coefficient_zero_leaves_the_local_model_at_its_start(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0, fixed_coefficient=0.0, **FREE), NO_DECAY)
    run.run()
    for client, state in run.states().items():
        assert_equal(state["local"], client_of(run, client).fresh_model())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_inv_sf_2_with_proximity_it_is_fedprox_at_twice_the_weight(mode: str, start: float) -> None:
    algorithm = SuPerFed(mode=mode, start=start, fixed_coefficient=0.0, orthogonality_weight=0.0, proximal_weight=0.2)
    reference = history(toy(Proximal(weight=0.4)))
    assert_close(history(toy(algorithm)), reference, atol=1e-12)
    distance = squared_distance(reference[3], history(toy(FedAvg()))[3])
    assert distance > 1e-4


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
    loss = algorithm.federated_objective(
        {"federated": federated}, some_batch(), two_layers(), {"received": received}, None
    )
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


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_6_at_coefficient_one_the_server_stands_still(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0, fixed_coefficient=1.0, **FREE), NO_DECAY)
    reference = toy(LocalOnly(), NO_DECAY)
    initial = copy(run.server)
    assert_equal(run.run(), initial)
    reference.run()
    assert_equal(run.states(), reference.states())
    for client, state in run.states().items():
        assert not torch.equal(state["local"]["head.weight"], client_of(run, client).fresh_model()["head.weight"])


def test_inv_sf_7_phase_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    original = RandomStreams.generator

    def spy(self: RandomStreams, name: str, round: int = -1, client: int = -1) -> np.random.Generator:
        asked.append((name, round))
        return original(self, name, round, client)

    monkeypatch.setattr(RandomStreams, "generator", spy)
    for start, first in ((0.5, 2), (0.0, 0), (0.3, 1), (1.0, 4)):
        asked.clear()
        toy(SuPerFed(start=start)).run()
        assert {round for name, round in asked if name == "mix"} == set(range(first, 4))


@pytest.mark.parametrize(
    ("start", "rounds", "first"), [(0.29, 100, 29), (0.0, 100, 0), (0.4, 200, 80), (0.35, 10, 3), (1.0, 7, 7)]
)
def test_inv_sf_7_the_first_mixing_round_survives_float_noise(start: float, rounds: int, first: int) -> None:
    algorithm = SuPerFed(start=start)
    assert [t for t in range(rounds) if algorithm.mixes(t, rounds)] == list(range(first, rounds))


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_8_number_of_draws(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[TrainRequest] = []
    original = Engine.execute

    def spy(self: Engine, batch: Any) -> list[Any]:
        requests.extend(batch)
        return original(self, batch)

    monkeypatch.setattr(Engine, "execute", spy)
    run = toy(SuPerFed(mode=mode, start=0.0))
    run.step([0, 1, 2, 3])
    assert [request.client for request in requests] == [0, 1, 2, 3]
    for request in requests:
        steps = 2 * -(-SIZES[request.client] // 8)
        shape = (steps,) if mode == "mm" else (steps, 2)
        expected = run.context.streams.generator("mix", 0, request.client).random(shape)
        assert request.draws is not None
        assert_equal(request.draws, {"coefficient": torch.from_numpy(expected)})


def test_inv_sf_8_one_layer_makes_lm_and_mm_the_same() -> None:
    runs = [toy(SuPerFed(mode=mode, start=0.0, orthogonality_weight=1.5), task=softmax_regression()) for mode in MODES]
    assert_equal(runs[0].run(), runs[1].run())
    assert_equal(runs[0].states(), runs[1].states())


def test_layers_of_lm_share_one_coefficient_between_weight_and_bias() -> None:
    task = normed()
    federated, local = models(task, 2)
    mixed = SuPerFed(mode="lm").mix(federated, local, torch.tensor([0.0, 1.0, 0.25], dtype=torch.float64), task)
    for name, leaf in mixed.items():
        ends = (federated[name], local[name])
        expected = {
            "inner": ends[0],
            "norm": ends[1] if name in task.network.parameter_names else ends[0],
            "head": 0.75 * ends[0] + 0.25 * ends[1],
        }[name.split(".")[0]]
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-15)
    assert list(mixed) == list(federated)


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_9_ends_of_the_evaluated_line(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0))
    run.run()
    for client, state in run.states().items():
        rows = rows_of(run, client, round=3)
        assert list(rows) == ["global", *(f"lambda={value}" for value in GRID)]
        assert_equal(rows["global"].built()[0], run.server["model"])
        assert_equal(rows["lambda=0.0"].built()[0], run.server["model"])
        assert_equal(rows["lambda=1.0"].built()[0], state["local"])


def test_inv_sf_10_the_line_is_affine_in_the_coefficient() -> None:
    task = softmax_regression()
    run = toy(SuPerFed(start=0.0), task=task)
    run.run()
    rows = rows_of(run, 0, round=3)
    line = [rows[f"lambda={value}"].built()[0] for value in GRID]
    epsilon = torch.finfo(torch.float64).eps
    for name, middle in line[5].items():
        ends = line[0][name], line[10][name]
        ulp = epsilon * torch.maximum(ends[0].abs(), ends[1].abs())
        assert ((middle - (ends[0] + ends[1]) / 2).abs() <= ulp).all()
    batch = some_batch(20)
    logits = [task.logits(model, batch) for model in line]
    losses = [float(task.cross_entropy(value, batch)) for value in logits]
    for value, mixed in zip(GRID, logits, strict=True):
        torch.testing.assert_close(mixed, (1 - value) * logits[0] + value * logits[10], rtol=0, atol=1e-12)
    assert all(losses[i - 1] + losses[i + 1] - 2 * losses[i] >= -1e-12 for i in range(1, 10))


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_11_order_of_the_ways_to_choose_a_coefficient(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.25, orthogonality_weight=1.0))
    run.run()
    scores = run.scores(final=True)
    accuracy = np.array([[s[f"lambda={value}"].top1 for value in GRID] for s in scores.values()])
    oracle, best_mean = accuracy.max(1).mean(), accuracy.mean(0).max()
    ends = accuracy.mean(0)[[0, -1]].max()
    assert oracle >= best_mean >= ends
    assert len(set(accuracy.flatten())) > 3
    for client, row in enumerate(scores.values()):
        assert row["global"].top1 == accuracy[client, 0]


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


def test_inv_sf_13_proximity_bounds_the_drift_on_quad() -> None:
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=200, batch_size=None, lr=0.3)
    for start in (0.0, 1.0):
        algorithm = SuPerFed(start=start, fixed_coefficient=0.0, orthogonality_weight=0.0, proximal_weight=0.7)
        server = Toy(algorithm, quadratic_clients([3.0], [2]), Quadratic(start=1.0), train).run()
        assert float(server["model"]["theta"]) == pytest.approx((3.0 + 1.4 * 1.0) / (1 + 1.4), abs=1e-12)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_inv_sf_14_only_the_federated_model_travels(start: float) -> None:
    run, reference = toy(SuPerFed(start=start)), toy(FedAvg())
    run.step([0, 2])
    reference.step([0, 2])
    assert run.federation.traffic == reference.federation.traffic
    assert set(run.server) == {"model"}
    assert set(run.server["model"]) == set(run.task.network.parameter_names)
    engine = run.federation._pool.hosts[0].engine  # type: ignore[attr-defined]
    procedure = run.algorithm.local_update(client_of(run, 1), run.server["model"])  # type: ignore[attr-defined]
    reply = run_procedures({1: procedure}, engine)[1]
    assert set(reply.tree) == set(run.task.network.parameter_names)
    assert reply.weight == SIZES[1]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_belong_to_the_federated_model(mode: str) -> None:
    """They record the mixed model's batches, travel with w^f, and neither penalty nor decay nor line touches them."""
    run = toy(SuPerFed(mode=mode, start=0.0, proximal_weight=0.1), task=normed())
    initial = copy(run.server["model"])
    run.run()
    buffers = run.task.network.buffer_names
    for name in buffers:
        assert (run.server["model"][name] - initial[name]).abs().max() > 1e-2
    for client, state in run.states().items():
        fresh = client_of(run, client).fresh_model()
        assert_equal({name: state["local"][name] for name in buffers}, {name: fresh[name] for name in buffers})
        for row in rows_of(run, client, round=3).values():
            assert_equal({name: row.built()[0][name] for name in buffers}, {n: run.server["model"][n] for n in buffers})


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


def test_own_local_models_differ_between_clients() -> None:
    run = toy(SuPerFed(start=0.0), TRAIN.model_copy(update={"lr": 0.0, "clients_per_round": 4}))
    run.step()
    locals_ = [state["local"] for state in run.states().values()]
    for client, local in enumerate(locals_):
        assert_equal(local, client_of(run, client).fresh_model())
        others = [*locals_[:client], *locals_[client + 1 :], run.server["model"]]
        assert not any(torch.equal(local["head.weight"], other["head.weight"]) for other in others)


def test_a_shared_local_model_is_the_same_for_all_and_not_the_global_one() -> None:
    run = toy(SuPerFed(start=0.0, local_init="shared"), TRAIN.model_copy(update={"lr": 0.0, "clients_per_round": 4}))
    run.step()
    first, *rest = [state["local"] for state in run.states().values()]
    for other in rest:
        assert_equal(other, first)
    assert not torch.equal(first["head.weight"], run.server["model"]["head.weight"])


def test_a_copied_local_model_is_the_first_model_received() -> None:
    """Also where the client first took part before mixing began."""
    run = toy(SuPerFed(start=0.5, local_init="copy"))
    received = [copy(run.server["model"])]
    for cohort in ([0], [0, 1]):
        received.append(copy(run.step(cohort)["model"]))
    assert_equal(run.states()[0]["local"], received[0])
    assert_equal(run.states()[1]["local"], received[1])
    assert not torch.equal(received[0]["head.weight"], received[1]["head.weight"])
    run.step([0])
    assert not torch.equal(run.states()[0]["local"]["head.weight"], received[0]["head.weight"])


def test_local_models_persist_between_rounds() -> None:
    run = toy(SuPerFed(start=0.0))
    run.step([0, 1])
    before = run.states()
    run.step([1, 2])
    assert_equal(run.states()[0], before[0])
    assert not torch.equal(run.states()[1]["local"]["head.weight"], before[1]["local"]["head.weight"])


def test_evaluation_in_the_first_phase_has_only_the_global_row() -> None:
    run = toy(SuPerFed(start=0.5))
    line = {f"lambda={value}" for value in GRID}
    for round in range(4):
        run.step()
        trained = [set(splits["test"]) for splits in run.federation.trained_scores.values()]
        expected = ({"global"}, {"local"}) if round < 2 else ({"global"} | line, line)
        assert all(rows == expected[1] for rows in trained)
        assert len(trained) == 3
        assert all(set(rows) == expected[0] for rows in run.scores().values())


def test_clients_never_mixed_are_scored_with_their_initial_local_model() -> None:
    run = toy(SuPerFed(start=0.0))
    run.step([0, 1])
    rows = rows_of(run, 3, round=0)
    assert_equal(rows["lambda=1.0"].built()[0], client_of(run, 3).fresh_model())
    assert set(run.states()) == {0, 1}


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
    assert penalty("norm_per_layer", model, anchor) == 4.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["squared", "norm_per_layer"])
def test_vectorized_matches_looped_on_ragged_clients(mode: str, form: str) -> None:
    algorithm = SuPerFed(mode=mode, start=0.25, proximal_weight=0.1, proximal_form=form)
    looped, stacked = (toy(algorithm, mode=engine) for engine in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run(), atol=1e-9)
    assert_close(looped.states(), stacked.states(), atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_vectorized_matches_looped_in_single_precision(mode: str) -> None:
    clients = random_clients(SIZES, dtype=torch.float32)
    train = TRAIN.model_copy(update={"momentum": 0.0})
    looped, stacked = (
        Toy(SuPerFed(mode=mode, start=0.0), clients, two_layers(double=False), train, mode=engine)
        for engine in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run(), atol=1e-5)
    assert_close(looped.states(), stacked.states(), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_hosts_do_not_matter(mode: str) -> None:
    one, three = (toy(SuPerFed(mode=mode, start=0.25), hosts=hosts) for hosts in (1, 3))
    assert_equal(one.run(), three.run())
    assert_equal(one.states(), three.states())


def test_evaluation_has_no_side_effects() -> None:
    run = toy(SuPerFed(start=0.0))
    run.run(2)
    states, server = run.states(), copy(run.server)
    first, second = run.scores(), run.scores()
    assert_equal(run.states(), states)
    assert_equal(run.server, server)
    assert all((first[c][row].vector == second[c][row].vector).all() for c in first for row in first[c])


def test_no_local_epochs_change_nothing() -> None:
    run = toy(SuPerFed(start=0.25), TRAIN.model_copy(update={"local_epochs": 0}))
    initial = copy(run.server)
    assert_equal(run.run(), initial)


def test_defaults() -> None:
    assert (SuPerFed().nu, SuPerFed(mode="lm").nu, SuPerFed(orthogonality_weight=0.0).nu) == (1.0, 2.0, 0.0)
    algorithm = SuPerFed()
    assert (algorithm.start, algorithm.proximal_weight, algorithm.proximal_form) == (0.4, 0.01, "squared")
    assert (algorithm.local_init, algorithm.aggregation) == ("own", "samples")
    assert tuple(GRID) == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
