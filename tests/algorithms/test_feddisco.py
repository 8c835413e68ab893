"""FedDisco: an oracle in plain PyTorch, federated averaging, discrepancies by hand, who counts, messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.feddisco import FedDisco, discrepancy
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, labelled, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

METRICS = ["kl", "l1", "l2", "cosine"]


def distance_of(labels: list[int], metric: str, classes: int = 3) -> float:
    """The discrepancy, with other formulas."""
    shares = [labels.count(c) / len(labels) for c in range(classes)]
    squares = sum(p * p for p in shares)
    return {
        "kl": sum(p * math.log(p * classes) for p in shares if p),
        "l1": sum(abs(p - 1 / classes) for p in shares),
        "l2": math.sqrt(max(squares - 1 / classes, 0)),
        "cosine": 1 - 1 / math.sqrt(squares * classes),
    }[metric]


@pytest.mark.parametrize("metric", METRICS)
def test_inv_disco_1_rounds_are_those_of_an_oracle_in_plain_pytorch(metric: Any) -> None:
    uniform = metric == "l1"
    method = FedDisco(metric=metric, discrepancy_weight=0.7, aggregation="uniform" if uniform else "samples")
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate([*COHORTS, [0, 1, 2, 3]]):
        parts = {k: toy.dataset.load(k)["train"] for k in cohort}
        far = {k: distance_of(part.y.tolist(), metric) for k, part in parts.items()}
        if metric == "kl":
            far = {k: value / sum(far.values()) for k, value in far.items()}
        sizes = {k: 1 if uniform else SIZES[k] for k in cohort}
        raw = {k: max(sizes[k] / sum(sizes.values()) - 0.7 * far[k] + 0.1, 0) for k in cohort}
        raw = raw if any(raw.values()) else {k: size / sum(sizes.values()) for k, size in sizes.items()}
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k, part in parts.items():
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
                loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            mean = {key: mean[key] + raw[k] / sum(raw.values()) * leaf.detach() for key, leaf in leaves.items()}
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_disco_2_without_discrepancy_and_offset_it_is_federated_averaging(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedDisco(discrepancy_weight=0, offset=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_disco_3_clients_with_the_same_frequencies_count_by_their_samples_and_the_offset() -> None:
    data = labelled([0, 0, 1], [1, 1, 1, 1, 2, 2])
    ours = Toy(FedDisco(discrepancy_weight=0.4, offset=0.2), data, two_layers(), TRAIN)
    ours.step([0, 1])
    assert_close(ours.server["discrepancies"], torch.full((2,), distance_of([0, 0, 1], "kl")).double(), 1e-6)
    found = ours.algorithm.weights(np.array([3, 6]), np.array([0.5, 0.5]))  # type: ignore[attr-defined]
    assert found.tolist() == [pytest.approx(1 / 3), pytest.approx(2 / 3)]


@pytest.mark.parametrize("metric", METRICS)
def test_inv_disco_4_equal_frequencies_have_no_discrepancy_and_one_class_has_the_largest(metric: Any) -> None:
    assert discrepancy(np.array([4.0, 4, 4]), metric) == pytest.approx(0, abs=1e-12)
    tried = [discrepancy(np.array(counts, float), metric) for counts in ([5, 4, 3], [8, 4, 0], [12, 0, 0])]
    assert tried == sorted(tried) and tried[-1] > tried[0] > 0
    assert tried[-1] == pytest.approx(distance_of([0], metric))
    # it does not depend on how many samples there are
    assert discrepancy(np.array([50.0, 40, 30]), metric) == pytest.approx(tried[0])
    assert discrepancy(np.zeros(3), metric) == 0


def test_inv_disco_5_whose_weight_is_0_moves_nothing() -> None:
    data = labelled([0, 1, 2, 0, 1, 2], [1, 1], [2, 0, 1])
    ours = Toy(FedDisco(metric="l1", discrepancy_weight=1.0, offset=0.1), data, two_layers(), TRAIN)
    alone = Toy(FedAvg(aggregation="uniform"), data, two_layers(), TRAIN)
    # 2/8 - 4/3 + 0.1 < 0
    assert_close(ours.step([0, 1])["model"], alone.step([0])["model"], 1e-12)


def test_where_nobody_is_left_clients_count_by_their_samples() -> None:
    data = labelled([0, 0, 0, 0], [1, 1])
    ours = Toy(FedDisco(metric="l1", discrepancy_weight=5.0, offset=0), data, two_layers(), TRAIN)
    theirs = Toy(FedAvg(), data, two_layers(), TRAIN)
    for _ in range(2):
        assert_close(ours.step([0, 1])["model"], theirs.step([0, 1])["model"], 1e-12)


def test_a_client_says_its_discrepancy_once() -> None:
    toy = toy_of(FedDisco(offset=1.0), task=two_layers())
    size, seen = num_bytes(initial(toy)), set[int]()
    for cohort in COHORTS:
        toy.step(cohort)
        expected = {k: (size + 8, size + (0 if k in seen else 8)) for k in cohort}
        assert toy.federation.traffic.by_client == expected
        seen |= set(cohort)
        assert {k for k, value in enumerate(toy.server["discrepancies"].tolist()) if value >= 0} == seen
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedDisco(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
    assert_equal(looped.server["discrepancies"], stacked.server["discrepancies"])
