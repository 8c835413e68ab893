"""FLOCO's published points, its options, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.floco import model_at
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.floco_toys import SIZES, floco, toy, train
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

HEAD = "head.weight"


@pytest.mark.parametrize(("tau", "row"), [(0, "personalized"), (99, "global")])
def test_published_model_is_the_trained_one_at_the_own_point(tau: int, row: str) -> None:
    """After a round of one client the server holds what that client trained."""
    run = toy(floco(assignment_round=tau))
    run.step([4])
    published = run.federation.trained_scores[4]["test"]["local"].vector
    assert np.array_equal(published, run.scores()[4][row].vector)
    assert not np.array_equal(published, toy(floco()).scores()[4][row].vector)


@pytest.mark.parametrize(
    "changes", [{"energy_on": "beta"}, {"scale_grid": "log"}, {"rescale_signals": True}, {"legacy_sampler": True}]
)
@pytest.mark.two_cases
def test_options_act_on_points_or_draws(changes: dict[str, Any]) -> None:
    default, changed = toy(floco()), toy(floco(**changes))
    default.run(3)
    changed.run(3)
    points = changed.server["points"]
    assert (points >= 0).all()
    if "legacy_sampler" in changes:
        assert_equal(points, default.server["points"])
        assert not torch.equal(changed.server["endpoints"], default.server["endpoints"])
        drawn = changed.algorithm.draw_around(points[0])(np.random.default_rng(0), 50)["point"]
        assert np.abs(drawn.sum(1) - 1).max() > 1e-3
    else:
        assert not torch.equal(points, default.server["points"])


def test_rescaled_points_do_not_depend_on_the_size_of_the_updates() -> None:
    """For steps so small that updates are linear in the learning rate."""
    points = [
        toy(
            floco(assignment_round=0, rescale_signals=True),
            train(rounds=1, lr=lr, momentum=0.0, weight_decay=0.0, batch_size=None, local_epochs=1),
        ).run()["points"]
        for lr in (1e-6, 1e-7)
    ]
    assert_close(points[0], points[1], 1e-3)
    assert (points[0].std(0) > 0.05).any()


def test_looped_equals_vectorized_on_ragged_clients() -> None:
    looped, stacked = toy(floco()), toy(floco(), mode="vectorized")
    assert_close(stacked.run(), looped.run(), 1e-5)
    assert "points" in looped.server


def test_inv_f7_hosts_do_not_change_a_bit() -> None:
    dataset, task = random_clients(SIZES, dtype=torch.float32), two_layers(double=False)
    one, three = Toy(floco(), dataset, task, train(), hosts=1), Toy(floco(), dataset, task, train(), hosts=3)
    for _ in range(4):
        assert_equal(one.step(), three.step())


def two_kinds_of_clients(sizes: Sequence[int]) -> ListDataset:
    """Even clients label by a rule, odd clients by its opposite: no single head serves both."""
    generator = torch.Generator().manual_seed(5)
    rule = torch.randn(5, generator=generator, dtype=torch.float64)
    clients = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
        clients.append((x, ((x @ rule > 0).long() + k) % 2))
    return ListDataset(clients, classes=2)


def test_own_points_beat_other_clients_points() -> None:
    settings = train(rounds=30, clients_per_round=4, batch_size=10, lr=0.3, weight_decay=0.0)
    sizes = (30, 30, 25, 25, 20, 20)
    algorithm = floco(simplex_dimension=1, assignment_round=5, radius=0.2)
    run = Toy(algorithm, two_kinds_of_clients(sizes), softmax_regression(classes=2), settings)
    points = run.run()["points"]
    for k in range(6):
        examples = run.dataset.load(k)["train"]
        batch = Batch(examples.x, examples.y)
        losses = [float(run.task.loss(model_at(run.server, point, run.task), batch)) for point in points]
        for other in range(1 - k % 2, 6, 2):
            assert losses[k] < losses[other] - 0.2
    final = run.scores(final=True)
    accuracy = {row: np.mean([final[k][row].top1 for k in range(6)]) for row in ("global", "personalized")}
    assert accuracy["personalized"] > 0.9 > accuracy["global"] + 0.2


def test_the_variance_of_updates_is_that_of_the_endpoints_alone() -> None:
    """Eq. 13: of the mean change of a client's endpoints, without the bias, which is no endpoint."""
    run = toy(floco())
    before, cohort = copy(run.server), [0, 2, 5]
    replies = [toy(floco()).step([client]) for client in cohort]
    run.step(cohort)
    changes = torch.stack([(reply["endpoints"] - before["endpoints"]).mean(0).flatten() for reply in replies])
    expected = float(((changes - changes.mean(0)) ** 2).sum())
    assert run.federation.updates.variance() == pytest.approx(expected, rel=1e-12)


def test_the_variance_of_one_endpoint_is_that_of_the_last_layers_weight() -> None:
    class WeightAlone(FedAvg):
        def update(self, trained: Tree, received: Tree, task: Any) -> Tensor:
            return trained[HEAD] - received["model"][HEAD]

    single, average = toy(floco(simplex_dimension=0)), toy(WeightAlone())
    for _ in range(2):
        single.step([0, 2, 5])
        average.step([0, 2, 5])
        assert single.federation.updates.variance() == average.federation.updates.variance()
