"""CFL: invariants CFL, both linkages, when a cluster is split, and what it refuses."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.cfl import CFL, bipartition
from algorithms.fedavg import FedAvg
from algorithms.parts.split_clusters import cosines, gram
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, map_leaves
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10, 9, 7)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=5, lr=0.1, momentum=0.5, weight_decay=0.01
)
EAGER = {"mean_norm": 1e9, "max_norm": 0.0, "split_from": 0}
EVERYBODY = list(range(6))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, sizes: Any = SIZES, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(sizes), task or two_layers(), train, **options)


def clusters(toy: Toy) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for client, number in toy.server["clusters"].items():
        found.setdefault(number, set()).add(int(client))
    return found


def some_changes(count: int, seed: int) -> list[Tree]:
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(3, generator=generator, dtype=torch.float64)} for _ in range(count)]


def crossing(similarities: Tensor, first: list[int], second: list[int]) -> float:
    return max(float(similarities[i, j]) for i, j in product(first, second))


@pytest.mark.parametrize("policy", ["uniform", "samples"])
def test_inv_cfl_1_without_splits_it_is_fedavg(policy: Any) -> None:
    never = CFL(mean_norm=0, max_norm=0, split_from=0, aggregation=policy)
    toy, plain = toy_of(never), toy_of(FedAvg(aggregation=policy))
    for _ in range(TRAIN.rounds):
        assert_equal(toy.step()["models"]["0"], plain.step()["model"])
    assert set(toy.server["models"]) == {"0"}
    for client, rows in toy.scores().items():
        assert rows["personalized"].vector.tolist() == plain.scores()[client]["global"].vector.tolist()


def test_inv_cfl_2_and_3_there_is_a_partition_at_all_times_and_it_only_gets_finer() -> None:
    toy = toy_of(CFL(**EAGER, min_size=1), TRAIN.model_copy(update={"rounds": 6}))
    before = clusters(toy)
    counts = [1]
    for _ in range(6):
        toy.step()
        after = clusters(toy)
        assert sorted(client for members in after.values() for client in members) == EVERYBODY
        assert set(after) == {int(number) for number in toy.server["models"]}
        for members in after.values():
            assert any(members <= old for old in before.values())
        counts.append(len(after))
        before = after
    assert counts == sorted(counts)
    assert counts[:3] == [1, 2, 4] or counts[2] == 3
    assert counts[-1] == 6


def test_inv_cfl_3_the_number_of_clusters_never_decreases() -> None:
    toy = toy_of(CFL(**EAGER))
    counts = []
    for _ in range(TRAIN.rounds):
        toy.step()
        counts.append(len(toy.server["models"]))
    assert counts == sorted(counts) and counts[0] == 2


def test_inv_cfl_4_two_camps_are_found_from_the_fixed_point() -> None:
    points = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.5)
    data = quadratic_clients(points, [1] * 6)
    toy = Toy(CFL(mean_norm=0.1, max_norm=0.3, split_from=0), data, Quadratic(start=0.0), train)
    toy.step()
    assert sorted(clusters(toy).values(), key=min) == [{0, 2, 3}, {1, 4, 5}]
    assert float(toy.server["models"]["0"]["theta"]) == 0.5
    assert float(toy.server["models"]["1"]["theta"]) == -0.5


def test_inv_cfl_4_known_changes() -> None:
    changes = [{"w": torch.tensor(row).double()} for row in ((1.0, 0.1), (1.0, -0.1), (-1.0, 0.2), (-0.9, -0.3))]
    products = gram(changes)
    similarities = cosines(products)
    first, second = bipartition(similarities, "single")
    assert (first, second) == ([0, 1], [2, 3])
    assert crossing(similarities, first, second) < -0.91
    assert abs(float(similarities[0, 1]) - 0.980198) < 1e-6
    assert abs(float(similarities[2, 3]) - 0.868243) < 1e-6
    assert abs(float(products.mean().sqrt()) - 0.035355) < 1e-6
    assert abs(float(products.diagonal().max().sqrt()) - 1.019804) < 1e-6
    assert CFL(mean_norm=0.036, max_norm=1.01).groups(range(4), changes, [1] * 4, {}) == [[0, 1], [2, 3]]
    for options in ({"mean_norm": 0.035}, {"max_norm": 1.02}, {"min_size": 4}):
        assert CFL(**{"mean_norm": 0.036, "max_norm": 1.01, **options}).groups(range(4), changes, [1] * 4, {}) == [
            [0, 1, 2, 3]
        ]


@pytest.mark.parametrize("seed", range(25))
def test_inv_cfl_5_single_linkage_is_the_best_bipartition(seed: int) -> None:
    size = 3 + seed % 6
    similarities = cosines(gram(some_changes(size, seed)))
    found = bipartition(similarities, "single")
    assert sorted([*found[0], *found[1]]) == list(range(size)) and found[0] and found[1]
    members = range(1, size)
    others = [list(chosen) for count in members for chosen in combinations(members, count)]
    least = min(crossing(similarities, [i for i in range(size) if i not in second], second) for second in others)
    assert abs(crossing(similarities, *found) - least) < 1e-12


def test_complete_linkage_is_another_bipartition() -> None:
    similarities = [cosines(gram(some_changes(7, seed))) for seed in range(40)]
    worse = [
        crossing(s, *bipartition(s, "complete")) > crossing(s, *bipartition(s, "single")) + 1e-9 for s in similarities
    ]
    assert 5 < sum(worse) < 40
    changes = some_changes(7, worse.index(True))
    single, complete = (
        CFL(mean_norm=1e9, max_norm=0, linkage=k).groups(range(7), changes, [1] * 7, {}) for k in ("single", "complete")
    )  # type: ignore[arg-type]
    assert single == list(bipartition(similarities[worse.index(True)], "single")) != complete


def test_inv_cfl_6_after_a_split_models_differ_by_their_own_means() -> None:
    toy, plain = toy_of(CFL(**EAGER)), toy_of(FedAvg(aggregation="uniform"))
    toy.step()
    for number, members in clusters(toy).items():
        plain = toy_of(FedAvg(aggregation="uniform"))
        assert_equal(toy.server["models"][str(number)], plain.step(sorted(members))["model"])


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_inv_cfl_7_the_scale_does_not_matter(scale: float) -> None:
    changes = some_changes(6, 3)
    scaled = [map_leaves(lambda leaf: scale * leaf, change) for change in changes]
    norm = float(gram(changes).mean().sqrt())
    for factor in (0.99, 1.01):
        one = CFL(mean_norm=factor * norm, max_norm=0.1).groups(range(6), changes, [1] * 6, {})
        other = CFL(mean_norm=scale * factor * norm, max_norm=scale * 0.1).groups(range(6), scaled, [1] * 6, {})
        assert one == other
        assert (len(one) == 2) == (factor > 1)


def test_the_gap_between_the_groups() -> None:
    changes = some_changes(6, 3)
    similarities = cosines(gram(changes))
    width = ((1 - crossing(similarities, *bipartition(similarities, "single"))) / 2) ** 0.5
    for gap, split in ((None, True), (0.99 * width, True), (1.01 * width, False)):
        found = CFL(mean_norm=1e9, max_norm=0, gap=gap).groups(range(6), changes, [1] * 6, {})
        assert (len(found) == 2) == split


def test_no_split_before_its_round() -> None:
    toy = toy_of(CFL(mean_norm=1e9, max_norm=0, split_from=2))
    counts = []
    for _ in range(4):
        toy.step()
        counts.append(len(toy.server["models"]))
    assert counts[:3] == [1, 1, 2]


def test_changes_of_zero_are_similar_to_nothing() -> None:
    changes = [*some_changes(3, 0), {"w": torch.zeros(3).double()}]
    found = cosines(gram(changes))
    assert torch.isfinite(found).all()
    assert not found[3].any()
    assert bipartition(torch.zeros(4, 4).double(), "single")[0][0] == 0


def test_a_cluster_of_which_someone_is_missing_is_not_split() -> None:
    toy = toy_of(CFL(**EAGER))
    toy.step([0, 1, 2, 3, 4])
    assert len(toy.server["models"]) == 1
    toy.step(EVERYBODY)
    assert len(toy.server["models"]) == 2
    models = copy(toy.server["models"])
    (absent,) = (number for number, members in clusters(toy).items() if 0 not in members)
    toy.step(sorted(clusters(toy)[1 - absent]))
    assert_equal(toy.server["models"][str(absent)], models[str(absent)])


def test_norms_are_those_of_parameters_and_buffers_are_averaged() -> None:
    sizes = (8, 12, 6, 10)
    train = TRAIN.model_copy(update={"batch_size": 4})
    toy = toy_of(CFL(**EAGER), train, normalized_layers(), sizes)
    toy.step()
    for number, members in clusters(toy).items():
        plain = toy_of(FedAvg(aggregation="uniform"), train, normalized_layers(), sizes)
        assert_equal(toy.server["models"][str(number)], plain.step(sorted(members))["model"])
        assert list(toy.server["models"][str(number)]) == list(plain.server["model"])


def test_everybody_has_to_take_part() -> None:
    few = toy_of(CFL(), TRAIN.model_copy(update={"clients_per_round": 3}))
    with pytest.raises(ConfigError, match=r"clients_per_round=all"):
        CFL().check(few.task, few.context)
    CFL().check(few.task, toy_of(CFL()).context)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(CFL(**EAGER), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
