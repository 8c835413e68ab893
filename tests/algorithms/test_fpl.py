"""FPL: an oracle in plain PyTorch, federated averaging, first neighbours, messages, and what nobody has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fpl import FPL, contrasts
from algorithms.parts.first_neighbours import cluster_means, finch
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, TRAIN, initial, labelled, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

ALL = TRAIN.model_copy(update={"clients_per_round": 4})


def parts_of(model: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits of two_layers."""
    features = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return features, features @ model["head.weight"].T + model["head.bias"]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def joined_once(points: list[Tensor], groups: list[set[int]]) -> list[set[int]]:
    """One partition: each group's mean, with the nearest other's, groups that meet being one."""
    means = [torch.stack([points[k] for k in sorted(group)]).mean(0) for group in groups]
    found = [{place} for place in range(len(groups))]
    for place, mean in enumerate(means):
        others = [other for other in range(len(groups)) if other != place]
        if not others:
            break
        nearest = max(others, key=lambda other: cosine(mean, means[other]))
        one, two = (next(kind for kind in found if who in kind) for who in (place, nearest))
        if one is not two:
            found = [kind for kind in found if kind is not one and kind is not two] + [one | two]
    return [set().union(*(groups[place] for place in kind)) for kind in found]


def grouped(points: list[Tensor], last: bool) -> list[set[int]]:
    groups = joined_once(points, [{place} for place in range(len(points))])
    while last and len(further := joined_once(points, groups)) > 1:
        groups = further
    return groups


def loss_of(model: Tree, x: Tensor, y: Tensor, prototypes: Mapping[int, list[Tensor]], method: FPL) -> Tensor:
    """The objective, sample by sample."""
    features, logits = parts_of(model, x)
    total = F.cross_entropy(logits, y, reduction="sum")
    for feature, label in zip(features, y.tolist(), strict=True):
        if label not in prototypes:
            continue
        weights = {
            kind: sum(torch.exp(F.cosine_similarity(feature, one, dim=0) / method.temperature) for one in among)
            for kind, among in prototypes.items()
        }
        total = total - method.contrast_weight * torch.log(weights[label] / sum(weights.values()))
        mean = torch.stack(prototypes[label]).mean(0)
        total = total + method.regularization_weight * F.mse_loss(feature, mean)
    return total / len(y)


SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"temperature": 0.3},
    "first": {"temperature": 0.3, "clusters": "first", "forget_absent": True},
    "contrast": {"regularization_weight": 0, "temperature": 0.1, "contrast_weight": 0.5},
    "regularization": {"contrast_weight": 0, "regularization_weight": 3.0, "aggregation": "uniform"},
}


def clients() -> Any:
    """Eight clients, of which the last two lack a class each."""
    generator = torch.Generator().manual_seed(4)
    sizes = [*(torch.randint(3, (n,), generator=generator).tolist() for n in (8, 9, 7, 10, 8, 6)), [0, 0, 1], [1, 2]]
    return labelled(*sizes)


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_fpl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FPL(**SETTINGS[name])
    toy = Toy(method, clients(), two_layers(), ALL)
    model, prototypes = initial(toy), {}
    for round, cohort in enumerate(([0, 1, 2, 3, 4, 5], [0, 2, 3, 5, 6, 7], [6], [1, 2, 4, 7])):
        means: dict[int, list[Tensor]] = {}
        total = {label: torch.zeros_like(leaf) for label, leaf in model.items()}
        mass = 0
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            n = len(part.y)
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, client)
            for index in plan_batches(n, 4, 2 * -(-n // 4), generator).batches(CPU):
                optimizer.zero_grad()
                loss_of(leaves, part.x[index], part.y[index], prototypes, method).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained = {key: leaf.detach() for key, leaf in leaves.items()}
            weight = 1 if method.aggregation == "uniform" else n
            mass += weight
            total = {key: total[key] + weight * leaf for key, leaf in trained.items()}
            features = parts_of(trained, part.x)[0]
            for label in sorted(set(part.y.tolist())):
                means.setdefault(label, []).append(features[part.y == label].mean(0))
        model = {key: leaf / mass for key, leaf in total.items()}
        if method.forget_absent:
            prototypes = {}
        for label, points in means.items():
            groups = grouped(points, method.clusters == "last")
            found = [torch.stack([points[k] for k in sorted(group)]).mean(0) for group in sorted(groups, key=min)]
            prototypes[label] = found
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)
        labels = [label for label in sorted(prototypes) for _ in prototypes[label]]
        assert toy.server["prototypes"]["labels"].tolist() == labels
        rows = torch.stack([one for label in sorted(prototypes) for one in prototypes[label]])
        assert_close(toy.server["prototypes"]["clusters"], rows, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_fpl_2_without_both_terms_it_is_federated_averaging_to_the_bit(make: Any, aggregation: Any) -> None:
    ours = toy_of(FPL(contrast_weight=0, regularization_weight=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        ours.step(cohort)
        theirs.step(cohort)
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_equal(ours.server["model"], theirs.server["model"])


def test_inv_fpl_3_the_first_round_is_federated_averagings() -> None:
    ours, theirs = toy_of(FPL()), toy_of(FedAvg())
    assert_equal(ours.step([0, 1, 2])["model"], theirs.step([0, 1, 2])["model"])


def test_inv_fpl_4_one_prototype_a_class_makes_the_contrast_a_cross_entropy_of_cosines() -> None:
    generator = torch.Generator().manual_seed(0)
    features, prototypes = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (7, 3))
    y, known = torch.tensor([0, 1, 2, 2, 1, 0, 1]), torch.ones(7, dtype=torch.bool)
    cosines = F.cosine_similarity(features[:, None], prototypes[None], dim=-1)
    expected = F.cross_entropy(cosines / 0.2, y, reduction="none")
    assert_close(contrasts(features, y, prototypes, torch.arange(3), known, 0.2), expected, 1e-12)
    doubled, labels = prototypes.repeat(2, 1), torch.arange(3).repeat(2)
    assert_close(contrasts(features, y, doubled, labels, known, 0.2), expected, 1e-12)
    scaled = contrasts(3 * features, y, prototypes, torch.arange(3), known, 0.2)
    assert_close(scaled, expected, 1e-12)
    alone = contrasts(features, y, prototypes[:1], torch.zeros(1, dtype=torch.int64), y == 0, 0.2)
    assert_close(alone, torch.zeros(7, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("coarsest", [False, True])
def test_inv_fpl_5_partitions_are_those_of_joining_first_neighbours(seed: int, coarsest: bool) -> None:
    generator = np.random.default_rng(seed)
    points = generator.standard_normal((int(generator.integers(1, 30)), 4))
    found = finch(points, coarsest)
    groups = grouped([torch.from_numpy(point) for point in points], coarsest)
    assert sorted(map(sorted, groups)) == [np.flatnonzero(found == one).tolist() for one in range(found.max() + 1)]
    assert len(points) == 1 or min(map(len, groups)) > 1, "nobody is alone"
    order = generator.permutation(len(points))
    again = finch(points[order], coarsest)
    assert {frozenset(order[again == one]) for one in again} == {frozenset(group) for group in groups}
    assert (finch(points * generator.uniform(0.5, 2, (len(points), 1)), False) == finch(points, False)).all()


def test_clusters_of_two_domains_are_found_and_count_equally() -> None:
    domains = np.repeat(np.eye(2), (5, 2), axis=0) + 0.01 * np.random.default_rng(0).standard_normal((7, 2))
    found = finch(domains)
    assert found.tolist() == [0] * 5 + [1] * 2
    assert np.allclose(cluster_means(domains, found).mean(0), 0.5, atol=0.02), "not 5/7 and 2/7"
    assert finch(np.zeros((3, 2))).tolist() == [0, 0, 0]
    assert finch(np.ones((1, 2))).tolist() == [0]


@pytest.mark.parametrize(("clusters", "count"), [("last", 2), ("first", 6)])
def test_the_last_partition_has_fewer_clusters_than_the_first(clusters: Any, count: int) -> None:
    """Six pairs of near clients, three in each of two domains; nobody has the second class."""
    angles = torch.tensor([0.0, 0.2, 0.41, 2.0, 2.2, 2.41], dtype=torch.float64).repeat_interleave(2)
    angles[1::2] += 0.01
    means = torch.stack([angles.cos(), angles.sin()], 1)[:, None].repeat(1, 2, 1)
    exist = torch.tensor([True, False]).repeat(12, 1)
    nothing = {"clusters": means.new_zeros(0, 2), "labels": torch.zeros(0, dtype=torch.int64)}
    found = FPL(clusters=clusters).renewed(nothing, means, exist)
    assert found["labels"].tolist() == [0] * count
    assert_close(found["clusters"], means[:, 0].view(count, -1, 2).mean(1), 1e-12)


def test_prototypes_travel_beside_the_model_and_clients_keep_nothing() -> None:
    toy = toy_of(FPL(), task=two_layers())
    size, (classes, width) = num_bytes(initial(toy)), toy.task.network.head_shape
    known = 0
    for cohort in COHORTS:
        toy.step(cohort)
        down = size + 8 * known * (width + 1)
        up = size + 8 * classes * (width + 1)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down, up))
        known = len(toy.server["prototypes"]["labels"])
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


@pytest.mark.parametrize("forget", [False, True])
def test_classes_that_nobody_has_keep_their_prototypes_or_lose_them(forget: bool) -> None:
    toy = Toy(FPL(forget_absent=forget), labelled([0, 1, 1], [1, 2], [0, 0]), two_layers(), TRAIN)
    toy.step([0, 1])
    before = toy.server["prototypes"]
    assert before["labels"].tolist() == [0, 1, 2]
    toy.step([2])
    after = toy.server["prototypes"]
    assert after["labels"].tolist() == ([0] if forget else [0, 1, 2])
    if not forget:
        assert_equal(after["clusters"][1:], before["clusters"][1:])


def test_a_client_left_out_between_both_passes_leaves_no_trace_in_the_next_round() -> None:
    toy = toy_of(FPL(), task=two_layers())
    toy.federation.begin_round(0)
    toy.federation.mean(toy.algorithm.guided_update, [0, 1], toy.server)
    other = toy_of(FPL(), task=two_layers())
    assert_equal(toy.step([0, 2]), other.step([0, 2]))


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_one_sample_and_one_class_give_finite_values(make: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1})
    toy = Toy(FPL(), labelled([0], [1, 1, 1], [2, 0]), make(), train, mode=mode)
    for cohort in ([0], [1, 2], [0, 1, 2]):
        toy.step(cohort)
    assert all(leaf.isfinite().all() for leaf in toy.server["model"].values())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (toy_of(FPL(temperature=0.5), train, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
    assert "failed together" not in caplog.text
