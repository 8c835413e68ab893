"""FedDrift: rounds against plain loops on data that drift, limits that are federated averaging, clusters by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.feddrift import FedDrift, cluster_distances, free_number
from rayfl.data.partitions.drifting import LabelStages
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.params import Tree, copy
from tests.support.drifting_clients import Drifting
from tests.support.plain_steps import steps
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (14, 12, 16, 10, 13, 15)
COHORTS = ([0, 1, 2, 3, 4, 5],) * 4 + ([0, 1, 3, 4, 5], [0, 2, 4], [1, 2, 3, 5], [0, 1, 4], [0, 1, 2, 3, 4, 5], [1, 5])
TRAIN = TrainConfig(
    rounds=10, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=1e-4, lr_decay=0.9
)
STAGGERED = [[0] * 6, [0, 1, 1, 2, 2, 0], [0, 1, 0, 2, 2, 1]]
TOGETHER = [[0] * 6, [1] * 6, [2] * 6]


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(
        algorithm, options.pop("dataset", None) or Drifting(SIZES, STAGGERED), task or two_layers(), train, **options
    )


def mean(models: Sequence[Tree], weights: Sequence[float]) -> Tree:
    pairs = list(zip(models, weights, strict=True))
    return {name: sum(w * model[name] for model, w in pairs) / sum(weights) for name in models[0]}


def loss_of(model: Tree, part: Examples) -> float:
    hidden = torch.relu(part.x @ model["inner.weight"].T + model["inner.bias"])
    return float(F.cross_entropy(hidden @ model["head.weight"].T + model["head.bias"], part.y))


class Plain:
    """The method in loops over clients and models."""

    def __init__(self, method: FedDrift, models: Sequence[Tree]) -> None:
        self.method, self.models, self.seen = method, dict(enumerate(models)), dict.fromkeys(range(len(models)), 0)
        self.cluster, self.last = dict.fromkeys(range(6), 0), dict.fromkeys(range(6), float("inf"))
        self.waiting: set[int] = set()
        self.found: list[str] = []

    def begin(self, data: Any, round: int) -> None:
        method, parts = self.method, {k: data.load(k)["train"] for k in range(6)}
        open_models = {m: model for m, model in self.models.items() if m not in {self.cluster[k] for k in self.waiting}}
        losses = {
            k: {m: loss_of(model, parts[k]) for m, model in open_models.items()}
            for k in range(6)
            if k not in self.waiting
        }
        for k, row in losses.items():
            self.cluster[k] = min(row, key=lambda m: (row[m], m))
        gone = [k for k, row in losses.items() if min(row.values()) > self.last[k] + method.threshold]
        self.last |= {k: min(row.values()) for k, row in losses.items()}
        together = None
        for k in gone:
            if together is None or method.variant == "full":
                if len(self.models) >= (method.most_models or 7):
                    unused = set(self.models) - set(self.cluster.values())
                    if not unused:
                        break
                    oldest = min(unused, key=lambda m: (self.seen[m], m))
                    del self.models[oldest]
                    self.found.append("dropped")
                together = min(set(range(9)) - set(self.models))
                self.models[together] = self.models[self.cluster[k]]
                self.found.append("begun")
            self.cluster[k] = together
            if method.variant == "full":
                self.waiting.add(k)
        if method.variant == "full":
            self.merge({k: row for k, row in losses.items() if k not in self.waiting})
        self.seen |= dict.fromkeys(self.cluster.values(), round)

    def merge(self, losses: Mapping[int, Mapping[int, float]]) -> None:
        limit = self.method.threshold if self.method.merge_threshold is None else self.method.merge_threshold
        members = {m: [k for k in losses if self.cluster[k] == m] for m in sorted({self.cluster[k] for k in losses})}

        def across(i: int, j: int) -> float:
            return sum(SIZES[k] * losses[k][i] for k in members[j]) / sum(SIZES[k] for k in members[j])

        apart = {
            (i, j): max(across(i, j) - across(i, i), across(j, i) - across(j, j), 0)
            for i in members
            for j in members
            if i < j
        }
        groups = {m: [m] for m in members}
        while apart and min(apart.values()) <= limit:
            i, j = min(apart, key=lambda pair: apart[pair])
            groups[i] += groups.pop(j)
            for m in groups:
                if m != i:
                    pairs = [(min(a, m), max(a, m)) for a in (i, j)]
                    apart[pairs[0]] = max(apart[pair] for pair in pairs)
            apart = {pair: value for pair, value in apart.items() if j not in pair}
            self.found.append("merged")
        for first, group in groups.items():
            weights = [sum(SIZES[k] for k in members[m]) for m in group]
            self.models[first] = mean([self.models[m] for m in group], weights)
            for m in group[1:]:
                del self.models[m]
                self.cluster |= {k: first for k in range(6) if self.cluster[k] == m}

    def train(self, toy: Toy, data: Any, cohort: Sequence[int], round: int) -> None:
        known: Any = SimpleNamespace(dataset=data, train=toy.train, context=toy.context)
        trained = {k: steps(known, self.models[self.cluster[k]], k, round) for k in cohort}
        for m in {self.cluster[k] for k in cohort}:
            who = [k for k in cohort if self.cluster[k] == m]
            weights = [1 if self.method.aggregation == "uniform" else SIZES[k] for k in who]
            self.models[m] = mean([trained[k] for k in who], weights)
        self.waiting -= set(cohort)


SETTINGS: dict[str, tuple[dict[str, Any], list[list[int]], set[str]]] = {
    "full": ({"threshold": 0.1, "merge_threshold": 0.6}, STAGGERED, {"begun", "merged"}),
    "limited": (
        {"threshold": 0.05, "most_models": 4, "aggregation": "uniform", "step_rounds": 1},
        STAGGERED,
        {"begun", "waited"},
    ),
    "eager": ({"variant": "eager", "threshold": 0.1, "most_models": 2}, TOGETHER, {"begun", "dropped"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_drift_1_rounds_are_those_of_plain_loops(name: str) -> None:
    options, concepts, happens = SETTINGS[name]
    method = FedDrift(**options)
    toy = toy_of(method, dataset=Drifting(SIZES, concepts))
    model = toy.server["models"]["0"]
    spare = {key: -leaf for key, leaf in model.items()}
    toy.server |= {"models": {"0": model, "1": spare}, "used": {"0": 0, "1": 0}}
    oracle = Plain(method, [model, spare])
    for round, cohort in enumerate(COHORTS):
        data: Any = toy.dataset.at(toy.dataset.stage_of(round))
        if round and round % method.step_rounds == 0:
            oracle.found += ["waited"] * bool(oracle.waiting)
            oracle.begin(data, round)
        oracle.train(toy, data, cohort, round)
        toy.step(cohort)
        assert toy.server["clusters"].tolist() == [oracle.cluster[k] for k in range(6)]
        assert_close(toy.server["models"], {str(m): model for m, model in oracle.models.items()}, 1e-12)
    assert set(oracle.found) == happens


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("options", [{"most_models": 1}, {"threshold": 1e6}, {"variant": "eager", "threshold": 1e6}])
@pytest.mark.first_case
def test_inv_drift_2_without_drift_it_is_federated_averaging_to_the_bit(options: Any, aggregation: Any) -> None:
    ours, plain = (
        toy_of(method, task=normalized_layers())
        for method in (FedDrift(aggregation=aggregation, **options), FedAvg(aggregation=aggregation))
    )
    for cohort in COHORTS[:7]:
        assert_equal(ours.step(cohort)["models"], {"0": plain.step(cohort)["model"]})
    left, right = ours.scores(), plain.scores()
    for client in range(6):
        assert left[client]["personalized"].vector.tolist() == right[client]["global"].vector.tolist()


def test_inv_drift_3_distances_by_hand() -> None:
    losses = np.array([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5], [2.0, 0.5, 9.0], [7.0, 7.0, 1.0]])
    found = cluster_distances(losses, [0, 0, 1, 2], np.array([1, 3, 5, 2]))
    # on the samples of the first cluster: (1 + 9) / 4, (5 + 12) / 4 and (2 + 7.5) / 4; then 2, 0.5, 9, and 7, 7, 1
    first, second, third = max(2 - 2.5, 4.25 - 0.5), max(7 - 2.5, 2.375 - 1), max(7 - 0.5, 9 - 1)
    assert found == pytest.approx(np.array([[0, first, second], [first, 0, third], [second, third, 0]]))
    assert not cluster_distances(np.ones((3, 2)), [0, 1, 1], np.array([1, 2, 3])).any()


def test_inv_drift_4_of_equal_models_everybody_takes_the_first_and_the_others_stay() -> None:
    toy = toy_of(FedDrift(threshold=0.0))
    model = copy(toy.server["models"]["0"])
    toy.server |= {"models": {n: copy(model) for n in ("7", "2", "0")}, "used": {"7": 0, "2": 0, "0": 0}}
    toy.server["clusters"] = torch.tensor([0, 2, 7, 7, 2, 0])
    toy.federation.begin_round(2)
    found = toy.algorithm.begin_step(toy.server, toy.federation)  # type: ignore[attr-defined]
    assert found["clusters"].tolist() == [0] * 6
    assert found["used"] == {"7": 0, "2": 0, "0": 2}
    assert_equal(found["models"], dict.fromkeys(("0", "2", "7"), model))


def test_inv_drift_5_the_model_that_nobody_has_had_for_longest_makes_room_and_no_other() -> None:
    state: Tree = {"models": dict.fromkeys("0123", 0), "used": {"0": 4, "1": 2, "2": 2, "3": 0}}
    state["clusters"] = torch.tensor([0, 0, 3])
    assert free_number(state, 5) == 4 and len(state["models"]) == 4
    assert free_number(state, 4) == 1 and list(state["models"]) == ["0", "2", "3"]
    state["models"]["1"], state["clusters"] = 0, torch.tensor([1, 2, 0, 3])
    assert free_number(state, 4) is None and len(state["models"]) == 4


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_a_stage_of_the_data_begins_a_step(rounds: int) -> None:
    toy = toy_of(FedDrift(step_rounds=3))
    toy.federation._context = replace(toy.federation.context, stages=LabelStages(count=3, rounds=rounds))
    begun, last = [], 0
    for round in range(8):
        toy.step([round % 6])
        if round and (round - last == 3 or round in (rounds, 2 * rounds)):
            last = round
        begun.append(toy.server["begun"] == last)
    assert all(begun)


def test_a_client_stays_alone_until_it_has_trained_its_model() -> None:
    toy = toy_of(FedDrift(threshold=0.1, merge_threshold=0.0, step_rounds=1))
    for cohort in COHORTS[:4]:
        toy.step(cohort)
    toy.step([0])
    first, *others = [k for k in range(6) if toy.server["alone"][k]]
    assert others and first != 0
    for cohort in ([0], [first], [0]):
        before = toy.server["models"]
        toy.step(cohort)
        alone = [k for k in range(6) if toy.server["alone"][k] == 1]
        assert set(others) <= set(alone) and (first in alone) == (cohort == [0] and toy.round == 6)
        for client in others:
            number = str(int(toy.server["clusters"][client]))
            assert_equal(toy.server["models"][number], before[number])


def test_newcomers_take_the_model_with_the_least_loss() -> None:
    toy = toy_of(FedDrift(), dataset=random_clients((*SIZES, 7, 9)), unseen=2)
    toy.step([0, 1, 2])
    toy.server["models"]["4"] = {name: -leaf for name, leaf in toy.server["models"]["0"].items()}
    found = toy.scores(newcomers=True)
    for client in (6, 7):
        part = toy.dataset.load(client)["train"]
        least = min(loss_of(model, part) for model in toy.server["models"].values())
        assert found[client]["personalized"].loss == pytest.approx(least, rel=1e-12)


def test_traffic_is_one_model_and_at_a_step_all_models_that_others_may_take() -> None:
    toy = toy_of(FedDrift(threshold=0.1), hosts=2)
    size, offered = 8 * toy.task.network.num_parameters, []
    for round, cohort in enumerate(COHORTS[:7]):
        own = int((toy.server["alone"] == 1).sum())
        models, step = len(toy.server["models"]) - own, round in (2, 4, 6)
        waiting = [k for k in range(6) if toy.server["alone"][k] == 1]
        toy.step(cohort)
        for client, found in toy.federation.traffic.by_client.items():
            asked = models * (step and client not in waiting)
            trains = client in cohort
            assert found == (size * (asked + trains) + 8 * trains, 8 * asked + size * trains)
        assert set(toy.federation.traffic.by_client) == set(cohort) | (set(range(6)) - set(waiting) if step else set())
        offered += [models] * step
    assert len(set(offered)) > 1


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedDrift(threshold=0.1), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS[:7]:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
    assert len(looped.server["models"]) > 1


@pytest.mark.slow
def test_after_a_drift_of_half_of_the_clients_each_half_has_a_model() -> None:
    """Where federated averaging has one model for labels that contradict each other."""
    train = TrainConfig(rounds=12, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.3)
    ours, plain = (
        Toy(method, Drifting([40] * 6, [[0] * 6, [0, 1] * 3]), softmax_regression(), train)
        for method in (FedDrift(), FedAvg())
    )
    ours.run()
    plain.run()
    clusters = ours.server["clusters"].tolist()
    assert clusters == clusters[:2] * 3 and clusters[0] != clusters[1]
    own = np.mean([rows["personalized"].top1 for rows in ours.scores().values()])
    shared = np.mean([rows["global"].top1 for rows in plain.scores().values()])
    assert own > 0.9
    assert shared < 0.65
