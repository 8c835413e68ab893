"""PACFL: rounds against plain loops, who is asked when, cluster by cluster federated averaging, newcomers, refusals."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.pacfl import PACFL
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples, InputSpec
from rayfl.params import copy, num_bytes
from rayfl.tasks.further_tasks import Regression
from tests.support.plain_steps import steps
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients, two_camps

SIZES = (8, 12, 6, 10, 9, 3)
COHORTS = ([0, 1, 2, 5], [1, 3], [0, 3, 4, 5], [2])
TRAIN = TrainConfig(
    rounds=4, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)


def along(axes: list[list[int]], sizes: tuple[int, ...] = SIZES, seed: int = 0) -> ListDataset:
    """Clients whose samples of class c lie near one axis each, in the positive direction.

    Args:
        axes: of each client, by class.
        sizes: samples of each client.
        seed: of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for client, size in zip(axes, sizes, strict=True):
        y = torch.arange(size) % len(client)
        x = 0.2 * torch.rand(size, 5, generator=generator, dtype=torch.float64)
        x[torch.arange(size), torch.tensor(client)[y]] += 1 + torch.rand(size, generator=generator, dtype=torch.float64)
        clients.append((x, y))
    return ListDataset(clients)


CAMPS = along([[0, 1, 2], [3], [0, 1, 2], [4], [3], [4]])
"""Six clients of three camps: 0 and 2, 1 and 4, 3 and 5."""


def toy_of(algorithm: Any, dataset: Any = CAMPS, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, dataset, task or two_layers(), train, **options)


def members(toy: Toy) -> list[list[int]]:
    """The clusters, in the order of their numbers."""
    found: dict[int, list[int]] = {}
    for client, number in toy.server["clusters"].items():
        found.setdefault(number, []).append(int(client))
    return [found[number] for number in sorted(found)]


def plain_signature(x: Tensor, y: Tensor, count: int) -> list[Tensor]:
    """The first eigenvectors of each class's second moment, as rows."""
    found = []
    for label in sorted(set(y.tolist())):
        rows = x[y == label]
        _, vectors = torch.linalg.eigh(rows.T @ rows)
        found += [vectors[:, -1 - a] for a in range(min(count, len(rows), rows.shape[1]))]
    return found


def plain_clusters(dataset: ListDataset, count: int, threshold: float) -> list[set[int]]:
    """Merges the nearest two clusters, by the mean over pairs of the least angle, until they are too far apart."""
    known = [plain_signature(one.x, one.y, count) for one in (dataset.load(k)["train"] for k in range(len(SIZES)))]

    def apart(i: int, j: int) -> float:
        return min(float(torch.rad2deg(torch.arccos(abs(u @ v).clamp(max=1)))) for u in known[i] for v in known[j])

    def distance(first: set[int], second: set[int]) -> float:
        return float(np.mean([apart(i, j) for i in first for j in second]))

    clusters = [{k} for k in range(len(SIZES))]
    while len(clusters) > 1:
        one, other = min(combinations(clusters, 2), key=lambda pair: distance(*pair))
        if distance(one, other) > threshold:
            break
        clusters = [cluster for cluster in clusters if cluster not in (one, other)] + [one | other]
    return sorted(clusters, key=min)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize(("dataset", "threshold"), [(CAMPS, 20.0), (random_clients(SIZES), 28.0)])
def test_inv_pacfl_1_rounds_are_those_of_plain_loops(dataset: ListDataset, threshold: float, aggregation: Any) -> None:
    toy = toy_of(PACFL(vectors=2, threshold=threshold, aggregation=aggregation), dataset)
    start = toy.server["models"]["0"]
    expected = plain_clusters(dataset, 2, threshold)
    models = dict.fromkeys(range(len(expected)), start)
    assert 1 < len(expected) < len(SIZES)
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        assert [set(cluster) for cluster in members(toy)] == expected
        for number, cluster in enumerate(expected):
            present = [client for client in cohort if client in cluster]
            weights = [1 if aggregation == "uniform" else SIZES[client] for client in present]
            trained = [steps(toy, models[number], client, round) for client in present]
            if present:
                models[number] = {
                    name: sum(w * one[name] for w, one in zip(weights, trained, strict=True)) / sum(weights)
                    for name in start
                }
        assert_close(toy.server["models"], {str(k): model for k, model in models.items()}, 1e-12)


@pytest.mark.parametrize("proximity", ["vectors", "subspaces", "sum"])
def test_camps_are_told_apart_before_anybody_trains(proximity: Any) -> None:
    toy = toy_of(PACFL(proximity=proximity, threshold=20.0, vectors=1))
    toy.step([1])
    assert members(toy) == [[0, 2], [1, 4], [3, 5]]


def test_inv_pacfl_2_all_clients_are_asked_in_the_first_round_and_then_none() -> None:
    toy = toy_of(PACFL(vectors=2, threshold=20.0), hosts=2)
    size = 8 * toy.task.network.num_parameters
    toy.step([1, 3])
    sent = {k: num_bytes(toy.server["signatures"][str(k)]) for k in range(len(SIZES))}
    assert sent[5] == 2 * (5 + 1) * 8  # two vectors of five numbers each, and their classes
    traffic = toy.federation.traffic.by_client
    assert traffic == {k: ((size + 8) * (k in (1, 3)), sent[k] + size * (k in (1, 3))) for k in range(len(SIZES))}
    kept = {key: copy(toy.server[key]) for key in ("signatures", "clusters")}
    for cohort in ([0, 3], [2]):
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size + 8, size))
    for key, value in kept.items():
        assert_equal(toy.server[key], value)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_inv_pacfl_3_one_cluster_is_fedavg(aggregation: Any, make: Any) -> None:
    sizes = (8, 12, 6, 10)
    for options in ({"threshold": 90.0}, {"clusters": 1}):
        one, plain = (
            toy_of(algorithm, random_clients(sizes), task=make())
            for algorithm in (PACFL(aggregation=aggregation, **options), FedAvg(aggregation=aggregation))
        )
        for cohort in ([0, 1, 3], [2], [1, 2, 3]):
            assert_equal(one.step(cohort)["models"], {"0": plain.step(cohort)["model"]})
        for client, rows in one.scores().items():
            assert rows["personalized"].vector.tolist() == plain.scores()[client]["global"].vector.tolist()


def test_inv_pacfl_4_a_cluster_for_each_client_is_local_training() -> None:
    one, alone = toy_of(PACFL(threshold=0)), toy_of(Local())
    for cohort in COHORTS:
        one.step(cohort)
        alone.step(cohort)
    assert members(one) == [[k] for k in range(6)]
    left, right = one.scores(), alone.scores()
    for client in range(6):
        assert left[client]["personalized"].vector.tolist() == right[client]["personalized"].vector.tolist()


def test_inv_pacfl_5_each_cluster_does_federated_averaging_and_one_without_anybody_keeps_its_model() -> None:
    toy = toy_of(PACFL(threshold=20.0))
    for round, cohort in enumerate(COHORTS):
        before = copy(toy.server["models"])
        toy.step(cohort)
        for number, cluster in enumerate(members(toy)):
            plain = toy_of(FedAvg())
            plain.round = round
            plain.server = {"model": before.get(str(number), before["0"])}
            present = [client for client in cohort if client in cluster]
            expected = plain.step(present)["model"] if present else plain.server["model"]
            assert_equal(toy.server["models"][str(number)], expected)


def test_inv_pacfl_6_equal_data_are_one_cluster_at_the_threshold_zero() -> None:
    (x, y), (other, z) = ((one.x, one.y) for one in (CAMPS.load(k)["train"] for k in (0, 1)))
    toy = toy_of(PACFL(threshold=0), ListDataset([(x, y), (other, z), (x.flip(0), y.flip(0)), (-other, z)]))
    toy.step([0])
    assert members(toy) == [[0, 2], [1, 3]]


def test_a_client_of_fewer_samples_than_vectors_has_as_many_as_its_samples_are_independent() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1, 1, 1, 2])
    x[3:6] = x[2]  # of class 1 there is one direction
    toy = toy_of(PACFL(vectors=3), ListDataset([(x, y), (0 * x, y), (x, y)]))
    toy.step([0, 1])
    assert toy.server["signatures"]["0"]["classes"].tolist() == [0, 0, 1, 2]
    assert toy.server["signatures"]["1"]["vectors"].shape == (5, 0)
    assert members(toy) == [[0, 2], [1]]


def test_clients_never_sampled_have_the_model_of_their_cluster() -> None:
    toy = toy_of(PACFL(threshold=20.0))
    start = toy.server["models"]["0"]
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert not common
    for client in range(6):
        assert_equal(own[client], {"model": start})
    toy.step([0, 1])
    _, own = toy.algorithm.served(toy.server, toy.context)
    for client, number in ((2, "0"), (4, "1"), (3, "2"), (5, "2")):
        assert_equal(own[client], {"model": toy.server["models"][number]})
    assert_equal(toy.server["models"]["2"], start)
    assert set(toy.scores()[5]) == {"personalized"}


def test_newcomers_take_the_model_of_the_cluster_that_is_nearest() -> None:
    axes = [[0, 1, 2], [3], [0, 1, 2], [4], [3], [4], [4], [2], [3]]
    toy = toy_of(PACFL(threshold=20.0), along(axes, (*SIZES, 4, 5, 1)), unseen=3)
    before = toy.scores(newcomers=True)  # nobody has told its signature yet
    assert set(before[6]) == {"personalized"}
    for cohort in COHORTS:
        toy.step(cohort)
    nearest = {6: "2", 7: "0", 8: "1"}
    for client, number in nearest.items():
        model = toy.server["models"][number]
        expected = toy.federation.evaluate({"model": model}, ("test",), False, None, [client], newcomers=True)
        found = toy.scores(newcomers=True)[client]["personalized"]
        assert found.vector.tolist() == expected[client]["test"]["personalized"].vector.tolist()
    assert set(toy.server["clusters"]) == set(toy.server["signatures"]) == {str(k) for k in range(6)}


def test_a_newcomer_without_samples_takes_the_first_cluster() -> None:
    toy = toy_of(PACFL(threshold=20.0))
    toy.step([0, 1, 3])
    nothing = Examples(torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    client: Any = SimpleNamespace(examples=lambda split: nothing)
    assert_equal(PACFL(threshold=20.0).nearest_model(client, toy.server), toy.server["models"]["0"])


def test_fine_tuning_starts_from_the_cluster_s_model() -> None:
    none, some = (toy_of(PACFL(threshold=20.0, finetune_epochs=epochs)) for epochs in (0, 3))
    for toy in (none, some):
        toy.run()
    for rows in none.scores(final=True).values():
        assert rows["finetuned"].vector.tolist() == rows["personalized"].vector.tolist()
    assert all(rows["finetuned"].loss < rows["personalized"].loss for rows in some.scores(final=True).values())


def test_without_classes_all_samples_are_taken_together() -> None:
    task = Regression(two_layers().network)
    with pytest.raises(ConfigError, match=r"pacfl cannot learn task=regression.*by_class=false"):
        PACFL().check_task(task)
    PACFL(by_class=False).check_task(task)
    together = toy_of(PACFL(by_class=False, vectors=2))
    together.step([0])
    assert all(one["classes"].tolist() == [0, 0] for one in together.server["signatures"].values())


def test_rows_of_tokens_are_refused() -> None:
    task = two_layers()
    task.spec = InputSpec("tokens", (5,), 3, 7)
    for by_class in (True, False):
        with pytest.raises(ConfigError, match=r"pacfl cannot learn task=.* from rows of tokens: .* no subspace"):
            PACFL(by_class=by_class).check_task(task)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_looped_and_vectorized_agree(dtype: torch.dtype) -> None:
    double = dtype == torch.float64
    looped, stacked = (
        toy_of(PACFL(threshold=28.0), random_clients(SIZES, dtype=dtype), task=two_layers(double=double), mode=mode)
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10 if double else 1e-5)
    assert all(leaf.dtype == dtype for model in stacked.server["models"].values() for leaf in model.values())
    assert looped.server["signatures"]["0"]["vectors"].dtype == torch.float64


@pytest.mark.slow
def test_clients_of_two_camps_that_contradict_each_other_do_better_than_with_one_model() -> None:
    """Concepts differ as the inputs' subspaces do: the clusters are known before the first round."""
    clients = two_camps(8)
    for client, (x, _) in enumerate(clients):
        x[:, 3 if client % 2 else 4] *= 4
    train = TrainConfig(rounds=15, clients_per_round=6, local_epochs=2, batch_size=10, lr=0.1)
    own, shared = (
        Toy(algorithm, ListDataset(clients), softmax_regression(), train)
        for algorithm in (PACFL(vectors=1, by_class=False, threshold=30.0), FedAvg())
    )
    own.run()
    shared.run()
    assert members(own) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert np.mean([rows["personalized"].top1 for rows in own.scores().values()]) > 0.9
    assert np.mean([rows["global"].top1 for rows in shared.scores().values()]) < 0.65
