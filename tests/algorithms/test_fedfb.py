"""FedFB: an oracle in plain PyTorch, steps of the shares by hand, projections, cells without samples, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedfb import FedFB, directions, moved
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import RayflError
from rayfl.experiment.parts import Parts
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
COHORTS = ([0, 1, 3], [2], [0, 1, 2, 3], [0, 3])
COUNTS = np.array([[3.0, 5.0], [4.0, 0.0], [2.0, 6.0]])
LOSSES = np.array([[1.5, 4.0], [3.0, 0.0], [1.0, 1.5]])


def toy_of(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), **{"train": TRAIN, **options})


def step_of_two(
    criterion: str, v: dict[tuple[int, int], float], total: dict[Any, float], count: dict[Any, int], alpha: float
) -> None:
    """Moves the weights v[label, group] of two groups by the step of the shares lambda, from sums by cell."""
    people = {a: count[0, a] + count[1, a] for a in (0, 1)}
    n = people[0] + people[1]
    if criterion == "statistical_parity":
        if not (people[0] and people[1]):
            return
        gap = -total[0, 0] / people[0] + total[1, 0] / people[0] + total[0, 1] / people[1] - total[1, 1] / people[1]
        gap += count[0, 0] / people[0] - count[0, 1] / people[1]
        for a, sign in ((0, -1), (1, 1)):
            share = v[0, a] * people[a] / n + sign * alpha * gap
            v[0, a] = min(max(share, 0.0), 2 * people[a] / n) * n / people[a]
            v[1, a] = 2 - v[0, a]
        return
    for y in (1,) if criterion == "equal_opportunity" else (0, 1):
        if not (count[y, 0] and count[y, 1]):
            continue
        gap, whole = total[y, 1] / count[y, 1] - total[y, 0] / count[y, 0], (count[y, 0] + count[y, 1]) / n
        now = [v[y, a] * count[y, a] / n for a in (0, 1)]
        # of what the two shares have together, which the cohort may have made another sum than theirs is to be
        upper = min(max(now[1] + alpha * gap + (whole - sum(now)) / 2, 0.0), whole)
        v[y, 1], v[y, 0] = upper * n / count[y, 1], (whole - upper) * n / count[y, 0]


@pytest.mark.parametrize("criterion", ["statistical_parity", "equal_opportunity", "equalized_odds"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_oracle_rounds_are_those_of_plain_pytorch(criterion: Any, mode: str) -> None:
    """Three classes, of which 1 is one and the others are the other; a round whose only client has one sample."""
    alpha = 0.8
    toy = toy_of(FedFB(criterion=criterion, alpha=alpha, alpha_decay=0.5, normalized=False), mode=mode)
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    v = {(y, a): 1.0 for y in (0, 1) for a in (0, 1)}
    for round, cohort in enumerate(COHORTS):
        parts = {client: toy.dataset.load(client)["train"] for client in cohort}
        cell = {k: [(int(y == 1), i % 2) for i, y in enumerate(part.y)] for k, part in parts.items()}
        above = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client, part in parts.items():
            n = len(part.y)
            cost = torch.tensor([v[one] for one in cell[client]], dtype=torch.float64)
            model = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.5)
            steps = 2 * -(-n // 4)
            for index in plan_batches(n, 4, steps, streams.generator("batches", round, client)).batches(CPU):
                optimizer.zero_grad()
                (cost[index] * each_loss(network, model, part.x[index], part.y[index])).mean().backward()
                optimizer.step()
            for name, leaf in model.items():
                above[name] += n / sum(SIZES[one] for one in cohort) * leaf.detach()
        w = above
        total, count = dict.fromkeys(v, 0.0), dict.fromkeys(v, 0)
        for client, part in parts.items():
            for one, value in zip(cell[client], each_loss(network, w, part.x, part.y), strict=True):
                total[one], count[one] = total[one] + float(value), count[one] + 1
        step_of_two(criterion, v, total, count, alpha / (round + 1) ** 0.5)
        server = toy.step(cohort)
        assert_close(server["model"], w, 1e-12)
        expected = [[v[y, a] for y in (0, 1)] for a in (0, 1)]
        assert_close(server["weights"], torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert max(abs(one - 1) for one in v.values()) > 0.1


def each_loss(network: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network.head_inputs_and_logits(model, x)[1], y, reduction="none")


def test_inv_fedfb_1_without_steps_it_is_federated_averaging_to_the_bit() -> None:
    fair, plain = toy_of(FedFB(alpha=0)), toy_of(FedAvg())
    for cohort in COHORTS:
        assert_close(fair.step(cohort)["model"], plain.step(cohort)["model"], 0)


def test_inv_fedfb_2_the_first_round_is_one_of_federated_averaging() -> None:
    """Shares are at first those of the samples, so that all weigh 1."""
    assert_close(toy_of(FedFB()).step([0, 1])["model"], toy_of(FedAvg()).step([0, 1])["model"], 1e-12)


@pytest.mark.parametrize("size", [0.01, 0.3, 100.0])
def test_inv_fedfb_3_shares_keep_their_sums_and_limits(size: float) -> None:
    """Also where the projection acts; a cell without samples keeps its weight."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        losses = generator.exponential(size=(3, 2)) * COUNTS
        weights = np.ones((3, 2))
        for _ in range(3):
            mu, _ = directions(losses, COUNTS, "statistical_parity")
            weights = moved(weights, COUNTS, size * mu, "statistical_parity")
        np.testing.assert_allclose(weights.sum(1), 2)
        assert (weights >= 0).all()
        weights = np.ones((3, 2))
        for _ in range(3):
            mu, _ = directions(losses, COUNTS, "equalized_odds")
            weights = moved(weights, COUNTS, size * mu, "equalized_odds")
        np.testing.assert_allclose((weights * COUNTS).sum(0), COUNTS.sum(0))
        assert (weights >= 0).all() and weights[1, 1] == 1


def test_directions_of_three_groups_by_hand() -> None:
    mu, length = directions(LOSSES, COUNTS, "equal_opportunity")
    f = 1.5 / 6 - 4 / 5  # the second group has nobody with the label 1
    np.testing.assert_allclose(mu, [[0, -f], [0, 0], [0, f]])
    assert length == pytest.approx(abs(f))
    mu, length = directions(LOSSES, COUNTS, "equalized_odds")
    first, second = 3 / 4 - 1.5 / 3, 1 / 2 - 1.5 / 3
    np.testing.assert_allclose(mu, [[-first - second, -f], [first, 0], [second, f]])
    assert length == pytest.approx(np.linalg.norm([first, second, f]))
    mu, length = directions(LOSSES, COUNTS, "statistical_parity")
    found = [(1.5 - 4 - 3) / 8, (3 - 4) / 4, (1 - 1.5 - 2) / 8]
    low = np.array([2 * found[0] - found[1] - found[2], found[1] - found[0], found[2] - found[0]])
    np.testing.assert_allclose(mu, np.stack([low, -low], 1))
    assert length == pytest.approx(np.linalg.norm(low))


def test_inv_fedfb_4_with_errors_in_place_of_losses_the_gap_is_that_of_the_metric() -> None:
    """F_a is P(1 given a) - P(1 given 0) if each sample's loss is 1 where the prediction is wrong."""
    generator = np.random.default_rng(1)
    group, y, said = generator.integers(0, [[3], [2], [2]], size=(3, 200))
    entered = [[(group == a) & (y == label) for label in (0, 1)] for a in range(3)]
    counts = np.array([[one.sum() for one in row] for row in entered], dtype=float)
    wrong = np.array([[(said != y)[one].sum() for one in row] for row in entered], dtype=float)
    mu, _ = directions(wrong, counts, "statistical_parity")
    rates = [said[group == a].mean() for a in range(3)]
    np.testing.assert_allclose(mu[1:, 0], [rates[1] - rates[0], rates[2] - rates[0]])


def test_inv_fedfb_5_normalized_steps_have_the_same_length_whatever_the_losses() -> None:
    toy = toy_of(FedFB(criterion="equal_opportunity", alpha=0.01))
    counts = np.zeros((2, 2))
    for client in COHORTS[0]:
        part = toy.dataset.load(client)["train"]
        np.add.at(counts, (np.arange(len(part.y)) % 2, (part.y == 1).long().numpy()), 1)
    before = np.ones((2, 2))
    for _ in range(2):
        after = toy.step(COHORTS[0])["weights"].numpy()
        shifted = np.abs(after - before) * counts / counts.sum()
        np.testing.assert_allclose(shifted, [[0, 0.01], [0, 0.01]], atol=1e-12)
        before = after


def test_inv_fedfb_6_a_group_of_which_a_cohort_has_nobody_keeps_its_weights() -> None:
    """The others move, unless the cohort has one group alone."""
    weights = np.array([[1.2, 0.8], [0.9, 1.1], [1.0, 1.0]])
    counts = np.array([[3.0, 5.0], [0.0, 0.0], [2.0, 6.0]])
    mu, _ = directions(LOSSES, counts, "statistical_parity")
    after = moved(weights, counts, mu, "statistical_parity")
    assert (after[1] == weights[1]).all() and (after[0] != weights[0]).all() and (after[2] != weights[2]).all()
    alone = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    for criterion in ("statistical_parity", "equalized_odds"):
        mu, length = directions(alone, alone, criterion)
        assert not mu.any() and length == 0
        np.testing.assert_allclose(moved(weights, alone, mu, criterion), weights)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataset": "breast_cancer"}, r"FedFB compares groups of people.*dataset\.group"),
        ({"dataset": "tests.metrics.test_people:three_classes"}, "the data have 2 groups and 3 classes"),
        ({"algorithm": {"name": "fedfb", "criterion": "average_odds"}}, r"algorithm\.criterion"),
        ({"aggregator": "median"}, "its clients say how large their losses are"),
    ],
)
def test_what_it_cannot_have_is_refused(sections: dict[str, Any], message: str) -> None:
    content = {
        "dataset": {"name": "synthetic_groups", "samples": 100},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fedfb",
        "train": {"clients_per_round": "all"},
        **sections,
    }
    with pytest.raises(RayflError, match=message):
        Parts(load_config(Experiment, content, [])).check()
