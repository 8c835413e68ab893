"""FeSEM: rounds against plain loops, first centers, who belongs where, newcomers, and messages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fesem import FeSEM
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, map_leaves
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import steps
from tests.support.toy_networks import Quadratic, normalized_layers, softmax_regression, two_layers
from tests.support.toys import (
    ListDataset,
    Toy,
    assert_close,
    assert_equal,
    quadratic_clients,
    random_clients,
    two_camps,
)

SIZES = (8, 12, 6, 10, 9, 3)
COHORTS = ([0, 1, 2, 5], [1, 3], [0, 3, 4, 5], [2], [0, 1, 2, 3, 4, 5])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    data = options.pop("dataset", random_clients(SIZES))
    return Toy(algorithm, data, task or two_layers(), train, **options)


def apart(one: Tree, other: Tree) -> float:
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


def merged(models: dict[int, Tree], most: int) -> list[list[int]]:
    """Merges the two clusters whose furthest members are nearest."""
    clusters = [[client] for client in models]
    while len(clusters) > most:
        one, other = min(
            combinations(clusters, 2),
            key=lambda pair: max(apart(models[i], models[j]) for i in pair[0] for j in pair[1]),
        )
        clusters = [cluster for cluster in clusters if cluster not in (one, other)] + [one + other]
    return sorted(sorted(cluster) for cluster in clusters)


def mean(models: list[Tree], weights: list[int]) -> Tree:
    return {
        name: sum(w * model[name] for w, model in zip(weights, models, strict=True)) / sum(weights)
        for name in models[0]
    }


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_inv_sem_1_rounds_are_those_of_plain_loops(count: int, aggregation: Any) -> None:
    toy = toy_of(FeSEM(centers=count, aggregation=aggregation))
    centers = [toy.server["models"]["0"]] * count
    belongs: dict[int, int] = {}
    for round, cohort in enumerate(COHORTS):
        every = [centers[number] for number in belongs.values()] or [centers[0]]
        shared = mean(every, [1] * len(every))
        trained = {k: steps(toy, centers[belongs[k]] if k in belongs else shared, k, round) for k in cohort}
        if not belongs:
            belongs = {k: number for number, group in enumerate(merged(trained, count)) for k in group}
        else:
            belongs |= {k: int(np.argmin([apart(model, c) for c in centers])) for k, model in trained.items()}
        for number in range(count):
            group = [k for k in cohort if belongs[k] == number]
            if group:
                weights = [1 if aggregation == "uniform" else SIZES[k] for k in group]
                centers[number] = mean([trained[k] for k in group], weights)
        toy.step(cohort)
        assert toy.server["clusters"] == {str(k): number for k, number in belongs.items()}
        assert_close(toy.server["models"], {str(k): center for k, center in enumerate(centers)}, 1e-12)
    assert len(set(belongs.values())) == count


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_inv_sem_2_one_center_is_fedavg(aggregation: Any, make: Any) -> None:
    data = random_clients((8, 12, 6, 10))
    one, plain = (
        toy_of(algorithm, task=make(), dataset=data)
        for algorithm in (FeSEM(centers=1, aggregation=aggregation), FedAvg(aggregation=aggregation))
    )
    for cohort in ([0, 1, 3], [2], [1, 2, 3]):
        assert_equal(one.step(cohort)["models"], {"0": plain.step(cohort)["model"]})
    left, right = one.scores(), plain.scores()
    for client in range(4):
        assert left[client]["personalized"].vector.tolist() == right[client]["global"].vector.tolist()


def test_inv_sem_3_centers_converge_to_the_means_of_their_groups() -> None:
    points = [-1.0, -3.0, 4.0, 6.0, 8.0]
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=None, lr=0.2)
    toy = Toy(FeSEM(), quadratic_clients(points, [3, 1, 2, 1, 1]), Quadratic(start=0.0), train)
    toy.run()
    assert toy.server["clusters"] == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1}
    assert abs(float(toy.server["models"]["0"]["theta"]) + 2) < 1e-9
    assert abs(float(toy.server["models"]["1"]["theta"]) - 6) < 1e-9


def test_a_client_moves_to_a_center_that_its_model_is_nearer_to() -> None:
    train = TrainConfig(rounds=9, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.9)
    toy = Toy(FeSEM(), quadratic_clients([0.0, 10.0, 9.0], [1] * 3), Quadratic(start=0.0), train)
    start = toy.server["models"]["0"]
    toy.server["models"] = {
        str(k): map_leaves(lambda leaf, to=to: 0 * leaf + to, start) for k, to in ((0, 0.0), (1, 10.0))
    }
    toy.server["clusters"] = {"0": 0, "1": 1, "2": 0}
    toy.step([0, 1, 2])
    assert toy.server["clusters"] == {"0": 0, "1": 1, "2": 1}
    assert float(toy.server["models"]["1"]["theta"]) == pytest.approx((10 + 8.1) / 2)
    assert float(toy.server["models"]["0"]["theta"]) == 0


def test_inv_sem_4_of_equal_distances_it_is_the_first_and_a_center_without_clients_stays() -> None:
    toy = toy_of(FeSEM(centers=3))
    toy.step([0])
    assert toy.server["clusters"] == {"0": 0}
    models = toy.server["models"]
    assert_equal(models["1"], models["2"])
    network, start = toy.task.network, models["1"]
    assert FeSEM(centers=3).nearest([start, models["0"]], models, network) == [1, 0]
    before = copy(models)
    toy.step([0])
    for number in ("1", "2"):
        assert_equal(toy.server["models"][number], before[number])


def test_a_cohort_without_anybody_changes_nothing() -> None:
    toy = toy_of(FeSEM())
    before = copy(toy.server["models"])
    toy.step([])
    assert_equal(toy.server, {"models": before, "clusters": {}})
    toy.step([0, 1])
    assert toy.server["clusters"] == {"0": 0, "1": 1}


def test_clients_without_a_center_have_the_mean_of_the_clients_centers() -> None:
    toy = toy_of(FeSEM(centers=2))
    toy.step([0, 1, 2])
    models, known = toy.server["models"], toy.server["clusters"]
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert not common
    expected = mean([models[str(number)] for number in known.values()], [1, 1, 1])
    for client in (3, 4, 5):
        assert_close(own[client]["model"], expected, 1e-12)
    for client in range(3):
        assert_equal(own[client], {"model": models[str(known[str(client)])]})


@pytest.mark.parametrize("epochs", [None, 0])
def test_newcomers_train_once_and_take_the_nearest_center(epochs: int | None) -> None:
    toy = toy_of(FeSEM(centers=2), dataset=random_clients((*SIZES, 7, 5)), unseen=2, unseen_epochs=epochs)
    for cohort in ([0, 1, 2], [3, 4, 5]):
        toy.step(cohort)
    models, shared = toy.server["models"], FeSEM().shared_model(toy.server)
    found = toy.scores(newcomers=True)
    for client in (6, 7):
        trained = steps(toy, shared, client, 1)
        nearest = min(models.values(), key=lambda center: apart(trained, center))
        model = shared if epochs == 0 else nearest
        common = {"model": model, "models": {"0": model}}
        alone = toy.federation.evaluate(common, ("test",), False, None, [client], newcomers=True)
        assert found[client]["personalized"].loss == pytest.approx(
            alone[client]["test"]["personalized"].loss, rel=1e-12
        )


def test_traffic_is_one_model_down_and_one_up() -> None:
    toy = toy_of(FeSEM(centers=3), hosts=2)
    size = 8 * toy.task.network.num_parameters
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))


def test_distances_are_those_of_parameters_and_buffers_are_averaged() -> None:
    toy = toy_of(FeSEM(centers=1), dataset=random_clients((8, 12)), task=normalized_layers())
    toy.step([0, 1])
    model = toy.server["models"]["0"]
    buffers = toy.task.network.buffer_names
    assert buffers
    other = {name: leaf + 5 if name in buffers else leaf for name, leaf in model.items()}
    third = map_leaves(lambda leaf: leaf + 1, model)
    assert FeSEM().nearest([model], {"0": third, "1": other}, toy.task.network) == [1]


def test_fine_tuning_starts_from_the_center() -> None:
    none, some = (toy_of(FeSEM(finetune_epochs=epochs)) for epochs in (0, 3))
    for toy in (none, some):
        toy.run()
    kept, tuned = none.scores(final=True), some.scores(final=True)
    for client in range(6):
        assert kept[client]["finetuned"].vector.tolist() == kept[client]["personalized"].vector.tolist()
        assert tuned[client]["finetuned"].loss < tuned[client]["personalized"].loss


@pytest.mark.parametrize("double", [True, False])
def test_looped_and_vectorized_agree(double: bool) -> None:
    assert_modes_agree(FeSEM(), (8, 12, 6, 10), TRAIN, double, 1e-10 if double else 1e-5)


@pytest.mark.slow
def test_clients_that_contradict_each_other_in_two_camps_are_told_apart() -> None:
    train = TrainConfig(rounds=15, clients_per_round=6, local_epochs=5, batch_size=10, lr=0.3)
    toy = Toy(FeSEM(), ListDataset(two_camps(8)), softmax_regression(), train)
    toy.run()
    camps = [toy.server["clusters"][str(client)] for client in range(8)]
    assert camps in ([0, 1] * 4, [1, 0] * 4)
    assert np.mean([rows["personalized"].top1 for rows in toy.scores().values()]) > 0.9
