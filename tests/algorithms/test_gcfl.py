"""GCFL and GCFL+: invariants GCFL, warping distances, least cuts, what is remembered, rounds against plain loops."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.cfl import CFL
from algorithms.fedavg import FedAvg
from algorithms.gcfl import GCFL, least_cut, warping_distances
from algorithms.parts.split_clusters import cosines, gram
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import subtract
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10, 9, 7)
TRAIN = TrainConfig(rounds=5, clients_per_round="all", local_epochs=2, batch_size=5, lr=0.1, momentum=0.5)
EAGER: dict[str, Any] = {"mean_norm": 1e9, "max_norm": 0.0, "split_from": 0, "length": 2}


def toy_of(algorithm: Any, train: TrainConfig = TRAIN) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train)


def clusters(toy: Toy) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for client, number in toy.server["clusters"].items():
        found.setdefault(str(number), []).append(int(client))
    return {number: sorted(members) for number, members in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("compare", ["norms", "changes"])
@pytest.mark.parametrize("policy", ["uniform", "samples"])
def test_inv_gcfl_1_without_splits_it_is_fedavg(policy: Any, compare: Any) -> None:
    toy = toy_of(GCFL(mean_norm=1e-9, max_norm=0, split_from=0, aggregation=policy, compare=compare))
    plain = toy_of(FedAvg(aggregation=policy))
    for _ in range(TRAIN.rounds):
        assert_equal(toy.step()["models"]["0"], plain.step()["model"])
    assert set(toy.server["models"]) == {"0"}


def slow_warping(a: list[float], b: list[float]) -> float:
    """Over all paths, as the definition has it."""

    def least(i: int, j: int) -> float:
        here = (a[i] - b[j]) ** 2
        if i == j == 0:
            return here
        before = [least(i - di, j - dj) for di, dj in ((1, 0), (0, 1), (1, 1)) if i >= di and j >= dj]
        return float(here + min(before))

    return float(least(len(a) - 1, len(b) - 1) ** 0.5)


def several_series(length: int) -> st.SearchStrategy[list[list[float]]]:
    one = st.lists(st.floats(-9, 9), min_size=length, max_size=length)
    return st.lists(one, min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5).flatmap(several_series))
def test_inv_gcfl_2_distances_are_the_least_over_all_paths(series: list[list[float]]) -> None:
    found = warping_distances(np.array(series))
    np.testing.assert_allclose(found, [[slow_warping(a, b) for b in series] for a in series], atol=1e-12)
    np.testing.assert_array_equal(found, found.T)
    assert not found.diagonal().any()


def test_inv_gcfl_2_a_delay_costs_little() -> None:
    delayed = warping_distances(np.array([[0.0, 0, 1, 2], [0, 1, 2, 2], [2, 1, 0, 0]]))
    assert delayed[0, 1] == 0 and delayed[0, 2] > 2


@pytest.mark.parametrize("seed", range(12))
def test_inv_gcfl_3_no_other_cut_is_smaller(seed: int) -> None:
    size = 2 + seed % 6
    weights = np.random.default_rng(seed).random((size, size))
    weights = weights + weights.T
    first, second = least_cut(weights)
    assert sorted([*first, *second]) == list(range(size)) and first[0] == 0 and second
    others = [set(chosen) for count in range(1, size) for chosen in combinations(range(1, size), count)]
    costs = [sum(weights[i, j] for i in one for j in range(size) if j not in one) for one in others]
    assert sum(weights[i, j] for i in first for j in second) == pytest.approx(min(costs), rel=1e-12)


def test_inv_gcfl_4_two_camps_are_found_by_how_far_they_go() -> None:
    """All go the same way, so that cosines say nothing; three go ten times as far."""
    train = TrainConfig(rounds=3, clients_per_round="all", batch_size=None, lr=0.5)
    data = quadratic_clients([1.0, 0.1, 1.0, 1.0, 0.1, 0.1], [1] * 6)
    toy = Toy(GCFL(**{**EAGER, "max_norm": 0.01, "split_from": 1}), data, Quadratic(start=0.0), train)
    toy.step()
    assert len(clusters(toy)) == 1
    toy.step()
    assert sorted(clusters(toy).values()) == [[0, 2, 3], [1, 4, 5]]


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("compare", ["norms", "changes"])
def test_inv_gcfl_5_rounds_are_those_of_plain_loops(compare: Any, standardize: bool) -> None:
    options = {"compare": compare, **({"standardize": standardize} if compare == "norms" else {})}
    toy = toy_of(GCFL(**EAGER, **options) if compare == "norms" else GCFL(**{**EAGER, **options, "length": 5}))
    groups, models = [list(range(6))], [toy.server["models"]["0"]]
    series: dict[int, list[float]] = {client: [] for client in range(6)}
    for _ in range(TRAIN.rounds):
        alone = {}
        for model, group in zip(models, groups, strict=True):
            for client in group:
                plain = toy_of(FedAvg())
                plain.server, plain.round = {"model": model}, toy.round
                alone[client] = plain.step([client])["model"]
        changes = {c: subtract(alone[c], m) for m, g in zip(models, groups, strict=True) for c in g}
        for client, change in changes.items():
            series[client].append(float(sum((leaf.double() ** 2).sum() for leaf in change.values()) ** 0.5))
        toy.step()
        after = []
        for group in groups:
            own = np.array([series[client][-2:] for client in group]) if compare == "norms" else None
            if len(group) <= 2 or (own is not None and own.shape[1] < 2):
                after.append(group)
                continue
            if own is None:
                weights = 1 + cosines(gram([changes[client] for client in group])).numpy()
            else:
                far = warping_distances(own / own.std(1, keepdims=True) if standardize else own)
                weights = far.max() - far
                series.update({client: [] for client in group})
            after += [[group[i] for i in half] for half in least_cut(np.maximum(weights, 0))]
        assert sorted(after) == sorted(clusters(toy).values())
        groups = list(clusters(toy).values())
        models = [toy.server["models"][number] for number in clusters(toy)]
        for model, group in zip(models, groups, strict=True):
            n = torch.tensor([SIZES[client] for client in group]).double()
            for name, leaf in model.items():
                rows = torch.stack([alone[client][name].double() for client in group])
                mean = torch.einsum("k,k...->...", n / n.sum(), rows)
                torch.testing.assert_close(leaf.double(), mean, rtol=0, atol=1e-6)


def test_inv_gcfl_6_series_have_a_length_and_begin_again_after_a_split() -> None:
    toy = toy_of(GCFL(mean_norm=1e9, max_norm=0, split_from=4, length=3))
    lengths = []
    for _ in range(5):
        toy.step()
        lengths.append({client: len(one) for client, one in toy.server["norms"].items()})
    assert lengths[:4] == [dict.fromkeys(map(str, range(6)), count) for count in (1, 2, 3, 3)]
    assert lengths[4] == {} and len(clusters(toy)) == 2


def test_series_have_no_gap_where_rounds_in_between_compare_directions() -> None:
    toy, between = toy_of(GCFL(split_from=9)), toy_of(GCFL(split_from=9, compare="changes"))
    toy.step()
    between.server, between.round = toy.server, 1
    assert toy.server["norms"] and between.step()["norms"] == {}


def test_directions_keep_no_series_and_cut_otherwise_than_cfl() -> None:
    options: dict[str, Any] = {"mean_norm": 1e9, "max_norm": 0, "split_from": 0}
    toys = [toy_of(GCFL(**options, compare="changes", aggregation="uniform")), toy_of(CFL(**options))]
    for toy in toys:
        toy.step()
    assert "norms" not in toys[0].server and len(clusters(toys[0])) == 2
    assert clusters(toys[0]) != clusters(toys[1])


def test_runs_that_are_too_short_for_a_split_are_told() -> None:
    context = toy_of(GCFL()).context
    assert "split_from is 20" in GCFL().remarks(context)[0]
    assert "length=9 norms" in GCFL(split_from=0, length=9).remarks(context)[0]
    assert not GCFL(split_from=0).remarks(context) and not GCFL(split_from=0, compare="changes").remarks(context)
