"""FLOCO on small problems with known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.floco import barycenter, model_at
from algorithms.parts.simplex import principal_coordinates
from algorithms.parts.simplex_sampling import sample_simplex
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, map_leaves, num_bytes
from rayfl.tasks.base import Batch
from tests.support.floco_toys import SIZES, floco, toy, train
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

torch.set_num_threads(1)

HEAD = "head.weight"


def simplex_of(server: Tree) -> Tree:
    return {"body": server["body"], "endpoints": server["endpoints"]}


def as_fedavg(server: Tree) -> Tree:
    """The model of a simplex with one endpoint."""
    return {**server["body"], HEAD: server["endpoints"][0]}


def gradients(endpoints: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dtheta by the method's objective, and dL/dw at w_alpha, on one batch."""
    task = softmax_regression()
    examples = random_clients([12]).load(0)["train"]
    batch = Batch(examples.x, examples.y)
    body = {"head.bias": torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)}
    moving = endpoints.clone().requires_grad_()
    loss = floco().objective({"body": body, "endpoints": moving}, batch, task, None, {"point": point})
    (by_endpoint,) = torch.autograd.grad(loss, moving)
    model = model_at({"body": body, "endpoints": endpoints}, point, task)
    weight = model[HEAD].clone().requires_grad_()
    (by_weight,) = torch.autograd.grad(task.loss({**model, HEAD: weight}, batch), weight)
    return by_endpoint, by_weight


# --- invariants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize(("tau", "radius"), [(0, 0.3), (2, 0.0), (2, 2.5), (99, 0.1)])
def test_inv_flo_1_one_endpoint_is_fedavg(aggregation: Any, tau: int, radius: float) -> None:
    one = toy(floco(simplex_dimension=0, assignment_round=tau, radius=radius, aggregation=aggregation))
    average = toy(FedAvg(aggregation=aggregation))
    assert_equal(as_fedavg(one.server), average.server["model"])
    for _ in range(4):
        assert_equal(as_fedavg(one.step()), average.step()["model"])


def test_inv_flo_1_in_single_precision_and_vectorized() -> None:
    settings = train()
    dataset = random_clients(SIZES, dtype=torch.float32)
    for mode in ("looped", "vectorized"):
        one = Toy(floco(simplex_dimension=0), dataset, two_layers(double=False), settings, mode=mode)
        average = Toy(FedAvg(), dataset, two_layers(double=False), settings, mode=mode)
        assert_equal(as_fedavg(one.run()), average.run()["model"])


def test_inv_flo_2_gradients_of_the_endpoints() -> None:
    endpoints = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    point = torch.tensor([0.4, 0.0, 0.35, 0.25], dtype=torch.float64)
    by_endpoint, by_weight = gradients(endpoints, point)
    assert_close(by_endpoint, point.view(4, 1, 1) * by_weight, 1e-15)
    assert_close(by_endpoint.sum(0), by_weight, 1e-15)
    singular = torch.linalg.svdvals(by_endpoint.reshape(4, -1))
    assert singular[0] > 0.01
    assert singular[1] < 1e-15


def test_inv_flo_3_aggregation_is_linear_in_the_endpoints() -> None:
    together = toy(floco(assignment_round=99))
    together.step([0, 2, 5])
    weights = np.array([SIZES[k] for k in (0, 2, 5)]) / sum(SIZES[k] for k in (0, 2, 5))
    alone = [simplex_of(toy(floco(assignment_round=99)).step([k])) for k in (0, 2, 5)]
    for row in sample_simplex(np.random.default_rng(0), 3, 5):
        point = torch.from_numpy(row)
        each = [model_at(tree, point, together.task) for tree in alone]
        expected = map_leaves(lambda *parts: sum(q * part for q, part in zip(weights, parts, strict=True)), *each)
        assert_close(model_at(together.server, point, together.task), expected, 1e-12)


def test_inv_flo_4_equal_endpoints() -> None:
    """One plain step moves endpoint m by alpha_m times the gradient, with the alpha of the stream ``mix``."""
    settings = train(rounds=1, local_epochs=1, batch_size=None, momentum=0.0, weight_decay=0.0, lr=0.3)
    run = Toy(floco(assignment_round=99), random_clients([12]), softmax_regression(), settings)
    average = Toy(FedAvg(), random_clients([12]), softmax_regression(), settings)
    start = run.server["endpoints"][0].clone()
    run.server["endpoints"] = start.repeat(3, 1, 1)
    for row in sample_simplex(np.random.default_rng(0), 3, 4):
        assert_close(model_at(run.server, torch.from_numpy(row), run.task)[HEAD], start, 1e-15)
    point = torch.from_numpy(sample_simplex(run.context.streams.generator("mix", 0, 0), 3, 1)[0])
    run.step()
    average.step()
    gradient = (start - average.server["model"][HEAD]) / 0.3
    assert_close(run.server["body"]["head.bias"], average.server["model"]["head.bias"], 1e-15)
    assert_close(run.server["endpoints"], start - 0.3 * point.view(3, 1, 1) * gradient, 1e-14)
    other = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)
    expected = start - 0.3 * (other @ point) * gradient
    assert_close(model_at(run.server, other, run.task)[HEAD], expected, 1e-14)


def test_inv_flo_8_raw_endpoints_give_the_coordinates_of_real_signals() -> None:
    run = toy(floco())
    run.run(2)
    run.federation.begin_round(2)
    before = run.server["endpoints"]
    replies = run.federation.map(run.algorithm.signal, range(6), broadcast={"model": simplex_of(run.server)})
    updates = [replies[k]["signal"] for k in range(6)]
    coordinates = principal_coordinates([u.numpy() for u in updates], 3)
    assert np.abs(coordinates).max() > 1e-3
    raw = principal_coordinates([(before + u).numpy() for u in updates], 3)
    np.testing.assert_allclose(raw, coordinates, atol=1e-10)
    np.testing.assert_allclose(coordinates.sum(0), 0, atol=1e-12)


@pytest.mark.parametrize("radius", [2.0, 3.0])
def test_inv_flo_14_radius_two_is_training_on_the_whole_simplex(radius: float) -> None:
    assigned, never = toy(floco(radius=radius)), toy(floco(assignment_round=99))
    for _ in range(4):
        assert_equal(simplex_of(assigned.step()), simplex_of(never.step()))
    assert "points" in assigned.server
    assert "points" not in never.server
    smaller = toy(floco(radius=0.3))
    smaller.run()
    assert not torch.equal(smaller.server["endpoints"], never.server["endpoints"])


def test_inv_flo_15_radius_zero_trains_at_the_point() -> None:
    algorithm = floco(radius=0.0)
    point = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    drawn = algorithm.draw_around(point)(np.random.default_rng(0), 5)["point"]
    assert np.array_equal(drawn, np.tile(point.numpy(), (5, 1)))


@pytest.mark.parametrize("rounds", [1, 4])
def test_inv_flo_15_before_the_assignment_personalized_is_global(rounds: int) -> None:
    run = toy(floco(assignment_round=99))
    run.run(rounds)
    for rows in run.scores(final=True).values():
        assert set(rows) == {"global", "personalized"}
        assert np.array_equal(rows["global"].vector, rows["personalized"].vector)


def test_inv_flo_16_global_is_the_network_with_the_mean_endpoint() -> None:
    run = toy(floco())
    run.run(3)
    plain = {**run.server["body"], HEAD: run.server["endpoints"].mean(0)}
    assert_close(model_at(run.server, barycenter(3), run.task), plain, 1e-14)
    for client, rows in run.scores().items():
        examples = run.dataset.load(client)["test"]
        assert abs(rows["global"].loss - float(run.task.loss(plain, Batch(examples.x, examples.y)))) < 1e-12


def test_inv_flo_17_assignment_leaves_no_other_trace() -> None:
    run = toy(floco())
    run.run(2)
    before = copy(run.server)
    run.federation.begin_round(2)
    points = run.algorithm.assign_points(simplex_of(run.server), run.federation)
    assert_equal(run.server, before)
    assert not any(run.states().values())
    again = run.algorithm.assign_points(simplex_of(run.server), run.federation)
    assert_equal(again, points)
    run.step()
    assert_equal(run.server["points"], points)


def test_inv_flo_17_signals_have_streams_of_their_own() -> None:
    run = toy(floco(assignment_round=99))
    before = simplex_of(copy(run.server))
    run.federation.begin_round(0)
    signal = run.federation.map(run.algorithm.signal, [4], broadcast={"model": before})[4]["signal"]
    update = run.step([4])["endpoints"] - before["endpoints"]
    assert not torch.equal(signal, update)
    assert signal.abs().max() > 0.01


# --- state, traffic, assignment ---------------------------------------------------------------------------------------


def test_points_are_assigned_once_to_all_clients_at_the_start_of_round_tau() -> None:
    run = toy(floco())
    for t in range(4):
        server = run.step([0, 1])
        assert ("points" in server) == (t >= 2)
        if t == 2:
            first = server["points"].clone()
    points = run.server["points"]
    assert_equal(points, first)
    assert points.shape == (6, 3)
    assert points.dtype == torch.float64
    assert (points >= 0).all()
    assert_close(points.sum(1), torch.ones(6, dtype=torch.float64), 1e-12)
    assert len({tuple(row.tolist()) for row in points}) > 1
    # clients 2..5 were never sampled
    rows = run.scores(final=True)
    assert any(not np.array_equal(rows[k]["global"].vector, rows[k]["personalized"].vector) for k in range(2, 6))


def test_clients_keep_nothing() -> None:
    run = toy(floco(), hosts=2)
    run.run()
    assert not any(run.states().values())


def test_the_assignment_keeps_no_optimizer() -> None:
    run = toy(floco(), train(persist_optimizer=True, momentum=0.5))
    run.run()
    assert {key for state in run.states().values() for key in state["optimizer"]} == {"main"}


def test_traffic_is_body_endpoints_and_point() -> None:
    run = toy(floco())
    simplex, point = num_bytes(simplex_of(run.server)), 3 * 8
    signal = num_bytes({"endpoints": run.server["endpoints"]})
    for t, (down, up) in enumerate([(3, 3), (3, 3), (3 + 6, 3), (3, 3)]):
        run.step()
        assert run.federation.traffic.down == down * simplex + (3 * point if t >= 2 else 0)
        assert run.federation.traffic.up == up * simplex + (6 * signal if t == 2 else 0)


def test_endpoints_start_from_their_own_streams() -> None:
    run = toy(floco(simplex_dimension=3))
    model = FedAvg().init(run.task, run.context)["model"]
    assert_equal(run.server["endpoints"][0], model[HEAD])
    assert_equal(run.server["body"], {name: model[name] for name in model if name != HEAD})
    for m in range(1, 4):
        seed = run.context.streams.integer("init.endpoint", client=m)
        assert_equal(run.server["endpoints"][m], run.task.network.initialize(seed)[HEAD])
    assert len({tuple(row.flatten().tolist()) for row in run.server["endpoints"]}) == 4


def test_too_few_clients_for_an_assignment_are_refused() -> None:
    run = toy(floco(simplex_dimension=6, assignment_round=99))
    floco(simplex_dimension=5).check(run.task, run.context)
    floco(simplex_dimension=6, assignment_round=4).check(run.task, run.context)  # never assigns in 4 rounds
    with pytest.raises(ConfigError, match=r"simplex_dimension: 6 needs at least 7 clients.*there are 6"):
        floco(simplex_dimension=6, assignment_round=3).check(run.task, run.context)


def test_population_leaves_the_mass_of_the_others_on_the_old_values() -> None:
    run, cohort = toy(floco(aggregation="population")), [1, 3]
    before = simplex_of(copy(run.server))
    inner = simplex_of(toy(floco()).step(cohort))
    share = sum(SIZES[k] for k in cohort) / sum(SIZES)
    expected = map_leaves(lambda old, new: old + share * (new - old), before, inner)
    assert_close(simplex_of(run.step(cohort)), expected, 1e-12)


# --- engine and learning --------------------------------------------------------------------------------------------
