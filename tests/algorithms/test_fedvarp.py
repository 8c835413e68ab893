"""FedVARP: an oracle in plain PyTorch, federated averaging, what stands in for absent clients, what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedvarp import FedVARP
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes, zeros_like
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 1, 10, 7)
TRAIN = TrainConfig(rounds=6, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 4], [2, 4], [0, 3], [0, 1, 2, 3, 4])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
WEIGHTS = pytest.mark.parametrize("weights", ["uniform", "samples"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def trained(toy: Toy, x: Tree, client: int, round: int) -> Tree:
    """The client's model after its local steps from x."""
    part, own = toy.dataset.load(client)["train"], copy(x)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(SIZES[client], 4, 2 * -(-SIZES[client] // 4), generator).batches(CPU):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
        loss = F.cross_entropy(toy.task.network.logits(leaves, part.x[index]), part.y[index])
        for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            own[name] = own[name] - 0.1 * (g + 0.01 * own[name])
    return own


@WEIGHTS
@pytest.mark.parametrize(
    ("clusters", "assignment", "expected"),
    [(None, "blocks", [0, 1, 2, 3, 4]), (2, "blocks", [0, 0, 0, 1, 1]), (3, "in_turn", [0, 1, 2, 0, 1])],
)
def test_inv_varp_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    weights: Any, clusters: int | None, assignment: Any, expected: list[int]
) -> None:
    method = FedVARP(clusters=clusters, assignment=assignment, aggregation=weights, server_lr=0.8)
    toy = toy_of(method)
    assert method.clusters_of(toy.context) == list(map(str, expected))
    x = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    y = {cluster: zeros_like(x) for cluster in set(expected)}
    mass = [1 if weights == "uniform" else size for size in SIZES]
    for round, cohort in enumerate(COHORTS):
        there = sum(mass[i] for i in cohort)
        change = {i: {name: leaf - x[name] for name, leaf in trained(toy, x, i, round).items()} for i in cohort}
        v = {}
        for name in x:
            v[name] = sum(mass[i] / there * (change[i][name] - y[expected[i]][name]) for i in cohort)
            v[name] = v[name] + sum(mass[j] / sum(mass) * y[expected[j]][name] for j in range(len(SIZES)))
        x = {name: leaf + 0.8 * v[name] for name, leaf in x.items()}
        for cluster in {expected[i] for i in cohort}:
            members = [i for i in cohort if expected[i] == cluster]
            total = sum(mass[i] for i in members)
            y[cluster] = {name: sum(mass[i] * change[i][name] for i in members) / total for name in x}
        toy.step(cohort)
        assert_close(toy.server["model"], x, 1e-12)
        for cluster, kept in toy.server["changes"].items():
            assert_close(kept, y[int(cluster)], 1e-12)
        mean = {name: sum(m * y[c][name] for m, c in zip(mass, expected, strict=True)) / sum(mass) for name in x}
        assert_close(toy.server["mean"], mean, 1e-12)


@MODES
@WEIGHTS
def test_inv_varp_2_with_one_cluster_it_is_federated_averaging(mode: str, weights: Any) -> None:
    ours = toy_of(FedVARP(clusters=1, aggregation=weights), mode=mode)
    plain = toy_of(FedAvg(aggregation=weights), mode=mode)
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


@MODES
@WEIGHTS
def test_inv_varp_3_with_everybody_in_every_round_it_is_federated_averaging(mode: str, weights: Any) -> None:
    ours = toy_of(FedVARP(aggregation=weights), mode=mode)
    plain = toy_of(FedAvg(aggregation=weights), mode=mode)
    assert_equal(ours.step([0, 3])["model"], plain.step([0, 3])["model"])  # nothing is kept yet
    ours, plain = toy_of(FedVARP(aggregation=weights), mode=mode), toy_of(FedAvg(aggregation=weights), mode=mode)
    for _ in range(4):
        assert_close(ours.step(range(5))["model"], plain.step(range(5))["model"], 1e-12)


def test_inv_varp_4_a_mean_over_cohorts_is_that_of_all_clients() -> None:
    """With changes that do not depend on the model, v is the mean of all changes, for any cohort."""
    train = TrainConfig(rounds=9, clients_per_round=2, local_epochs=1, batch_size=None, lr=1e-9)
    # so far that a step changes the gradient by little
    points, start = (3e6, -1e6, 5e6, 2e6), 0.0
    for aggregation, mean in (("uniform", 2.25e6), ("samples", (3 - 2 + 25 + 2) / 9 * 1e6)):
        toy = Toy(
            FedVARP(aggregation=aggregation), quadratic_clients(points, (1, 2, 5, 1)), Quadratic(start=start), train
        )
        for cohort in ([0, 1], [2, 3]):
            toy.step(cohort)
        for cohort in ([0, 2], [1], [3, 2]):
            before = float(toy.server["model"]["theta"])
            after = float(toy.step(cohort)["model"]["theta"])
            assert after - before == pytest.approx(1e-9 * mean, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [None, 2])
def test_inv_varp_5_it_stays_at_the_optimum_of_all_whatever_the_cohort(clusters: int | None) -> None:
    """Once each client's change at the optimum is known; federated averaging moves with its cohort."""
    train = TrainConfig(rounds=300, clients_per_round=2, local_epochs=2, batch_size=None, lr=0.1)
    points = (0.0, 0.0, 6.0, 6.0)  # alike in each block of two
    cohorts = np.random.default_rng(0)
    for method, stays in ((FedVARP(clusters=clusters), True), (FedAvg(aggregation="uniform"), False)):
        toy = Toy(method, quadratic_clients(points, (1, 3, 2, 1)), Quadratic(start=-4.0), train)
        for _ in range(200):
            toy.step(sorted(cohorts.choice(4, 2, replace=False).tolist()))
        ends = []
        for cohort in ([0, 1], [2, 3]):
            ends.append(float(toy.step(cohort)["model"]["theta"]))
        assert (max(abs(end - 3.0) for end in ends) < 1e-6) == stays


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("clusters", [None, 2])
def test_vectorized_agrees_with_looped(clusters: int | None, double: bool) -> None:
    method = FedVARP(clusters=clusters)
    looped, stacked = (
        Toy(
            method,
            random_clients(SIZES, dtype=torch.float64 if double else torch.float32),
            two_layers(double=double),
            TRAIN,
            mode=mode,
        )
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        one, other = looped.step(cohort), stacked.step(cohort)
        assert_close(one, other, 1e-10 if double else 1e-5)
        assert all(leaf.dtype == torch.float64 for leaf in one["mean"].values())


def test_buffers_are_averaged_and_nothing_of_them_is_kept() -> None:
    methods = FedVARP(server_lr=0.5), FedAvg(aggregation="uniform")
    ours, plain = (Toy(method, random_clients((8, 12, 6)), normalized_layers(), TRAIN) for method in methods)
    ours.step([0, 1])
    plain.step([0, 1])
    network = ours.task.network
    assert set(ours.server["changes"]["0"]) == set(network.parameter_names) and network.buffer_names
    for name in network.buffer_names:
        assert_equal(ours.server["model"][name], plain.server["model"][name])


def test_what_is_kept_and_what_travels() -> None:
    for clusters, most in ((None, 5), (2, 2)):
        toy = toy_of(FedVARP(clusters=clusters))
        size = num_bytes(toy.server["model"])
        for cohort in COHORTS:
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
        assert len(toy.server["changes"]) == most and not any(toy.states().values())
        assert toy.algorithm.kept_of_client(toy.task, 5) == (size if clusters is None else -(-2 * size // 5))


def test_clusters_drawn_at_random_are_as_large() -> None:
    context = toy_of(FedVARP()).context
    drawn = FedVARP(clusters=2, assignment="random").clusters_of(context)
    assert sorted(drawn) == ["0", "0", "0", "1", "1"]
    assert drawn == FedVARP(clusters=2, assignment="random").clusters_of(context)


def test_what_is_undefined_is_refused_and_what_says_nothing_new() -> None:
    toy = toy_of(FedVARP())
    FedVARP(clusters=5).check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm\.clusters is 6, but only 5 clients.*set it to null"):
        FedVARP(clusters=6).check(toy.task, toy.context)
    assert not FedVARP().remarks(toy.context) and not FedVARP(clusters=2).remarks(toy.context)
    (one,) = FedVARP(clusters=1).remarks(toy.context)
    (everybody,) = FedVARP().remarks(toy_of(FedVARP(), TRAIN.model_copy(update={"clients_per_round": "all"})).context)
    assert "there is one cluster" in one and "all clients take part" in everybody
