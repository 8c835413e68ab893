"""RoFL: an oracle in plain PyTorch, and invariants ROFL of small losses, centroids and replaced labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.rofl import RoFL, aligned, smallest
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch
from tests.support.partial_toys import initial, labelled, three_layers
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

TRAIN = TrainConfig(
    rounds=5, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SKEWED = labelled(
    [0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 6 + [1, 2], [0, 1, 2, 2, 2, 1, 1], [1, 1, 0, 2, 2], [0, 1, 2, 1, 0]
)
"""The second client lacks a class; the last is never sampled."""
COHORTS = ([1], [0, 1, 2], [1, 3, 4], [0, 2, 3, 4], [0, 1, 3])
SHORT: dict[str, Any] = {"forget_rounds": 3, "forget_rate": 0.4, "pseudo_from": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": SHORT,
    "strong": {**SHORT, "centroid_weight": 3.0, "entropy_weight": 0.1, "aggregation": "uniform", "pseudo_from": 0},
    "labels-alone": {**SHORT, "centroid_weight": 0.0, "entropy_weight": 0.0, "forget_rounds": 0},
}


def toy_of(method: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(method, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


def parts_of(model: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits of two_layers."""
    features = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return features, features @ model["head.weight"].T + model["head.bias"]


def cosine(a: Tensor, b: Tensor) -> float:
    length = float((a.norm() * b.norm()).detach())
    return float((a @ b).detach()) / length if length else 0.0


class Oracle:
    """RoFL client by client and sample by sample; centroids are a dictionary by class."""

    def __init__(self, toy: Toy, method: RoFL) -> None:
        self.toy, self.method, self.model = toy, method, initial(toy)
        self.centroids: dict[int, Tensor] = {}

    def trained(self, k: int, t: int) -> tuple[Tree, dict[int, Tensor]]:
        method, part = self.method, self.toy.dataset.load(k)["train"]
        before = [parts_of(self.model, x[None]) for x in part.x]
        centroids = dict(self.centroids)
        for label in set(part.y.tolist()) - set(centroids):
            own = [features[0] for (features, _), y in zip(before, part.y.tolist(), strict=True) if y == label]
            centroids[label] = sum(own) / len(own)  # type: ignore[assignment]
        said = [int(logits.argmax()) for _, logits in before]
        forgotten = method.forget_rate * (min(1, t / method.forget_rounds) if method.forget_rounds else 1)
        pull = method.centroid_weight * (min(1, (t + 1) / method.pseudo_from) if method.pseudo_from else 1)
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in self.model.items()}
        optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
        generator = self.toy.context.streams.generator("batches", t, k)
        for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
            rows = []
            for i in index.tolist():
                features, logits = parts_of(leaves, part.x[i][None])
                rows.append((i, int(part.y[i]), features[0], logits[0].log_softmax(0)))
            rows.sort(key=lambda row: -float(row[3].detach()[row[1]]))
            rows = rows[: max(1, math.floor((1 - forgotten) * len(rows) + 1e-9))]
            total = torch.zeros((), dtype=torch.float64)
            for i, y, features, logs in rows:
                confident = max(sorted(centroids), key=lambda j: cosine(centroids[j], features)) == y
                target = y if confident or t < method.pseudo_from else said[i]
                total = total - logs[target] - method.entropy_weight * (logs.exp() * logs).sum()
                if confident:
                    total = total + pull * ((features - centroids[y]) ** 2).mean()
            optimizer.zero_grad()
            (total / len(rows)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for label in {y for _, y, _, _ in rows}:
                own = [features.detach() for _, y, features, _ in rows if y == label]
                mean = torch.stack(own).mean(0)
                centroids[label] = centroids[label] + cosine(centroids[label], mean) ** 2 * (mean - centroids[label])
        return {name: leaf.detach() for name, leaf in leaves.items()}, centroids

    def step(self, t: int, cohort: list[int]) -> None:
        found = {k: self.trained(k, t) for k in cohort}
        uniform = self.method.aggregation == "uniform"
        sizes = {k: 1 if uniform else len(self.toy.dataset.load(k)["train"].y) for k in cohort}
        self.model = {
            name: sum(sizes[k] / sum(sizes.values()) * found[k][0][name] for k in cohort)  # type: ignore[misc]
            for name in self.model
        }
        for label in range(3):
            theirs = [centroids[label] for _, centroids in found.values() if label in centroids]
            old = self.centroids.get(label)
            weights = [1.0 if old is None else max(0.0, cosine(old, one)) for one in theirs]
            if sum(weights):
                self.centroids[label] = sum(w * c for w, c in zip(weights, theirs, strict=True)) / sum(weights)  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["default", "strong", pytest.param("labels-alone", marks=pytest.mark.slow)])
def test_inv_rofl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = RoFL(**SETTINGS[name])
    toy = toy_of(method)
    oracle = Oracle(toy, method)
    for t, cohort in enumerate(COHORTS):
        oracle.step(t, list(cohort))
        toy.step(cohort)
        assert_close(toy.server["model"], oracle.model, 1e-12)
        assert toy.server["exist"].tolist() == [float(label in oracle.centroids) for label in range(3)]
        for label, centroid in oracle.centroids.items():
            assert_close(toy.server["centroids"][label], centroid, 1e-12)
        assert not any(toy.states().values())


@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (normalized_layers, 4),
        *(
            pytest.param(make, batch_size, marks=pytest.mark.slow)
            for make, batch_size in ((two_layers, 4), (two_layers, None), (three_layers, 4))
        ),
    ],
)
def test_inv_rofl_2_looped_and_vectorized_agree_and_one_host_is_three(make: Any, batch_size: int | None) -> None:
    train = TRAIN.model_copy(update={"batch_size": batch_size})
    toys = [toy_of(RoFL(**SHORT), train, task=make(), mode=mode) for mode in ("looped", "vectorized")]
    toys.append(toy_of(RoFL(**SHORT), train, task=make(), hosts=3))
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server, toys[1].server, 1e-9)
    assert bool(toys[0].server["centroids"].isfinite().all())
    assert_equal(toys[2].server, toys[0].server)


@pytest.mark.parametrize("padding", [0, 3])
def test_inv_rofl_3_the_smallest_losses_are_taken_whatever_the_padding(padding: int) -> None:
    losses = torch.tensor([0.3, 0.1, 2.0, 0.2, 0.7, *[0.0] * padding], dtype=torch.float64)
    mask = torch.tensor([1.0] * 5 + [0.0] * padding, dtype=torch.float64) if padding else None
    batch = Batch(losses, losses, mask)
    for share, wanted in ((1.0, {0, 1, 2, 3, 4}), (0.8, {0, 1, 3, 4}), (0.6, {0, 1, 3}), (0.59, {1, 3}), (0.0, {1})):
        assert set(smallest(losses, batch, share).nonzero().flatten().tolist()) == wanted
    equal = Batch(losses, torch.zeros_like(losses), mask)
    assert int(smallest(torch.zeros_like(losses), equal, 0.6).sum()) == 3


def test_inv_rofl_4_what_the_server_finds_is_between_what_it_is_sent() -> None:
    generator = torch.Generator().manual_seed(0)
    old, theirs = torch.rand(3, 6, generator=generator), torch.rand(4, 3, 6, generator=generator)
    exist, known = torch.tensor([1.0, 0.0, 1.0]), torch.ones(4, 3)
    known[:, 2] = 0
    found = aligned(old, exist, theirs, known)
    assert bool((found["centroids"][:2] >= theirs[:, :2].min(0).values - 1e-6).all())
    assert bool((found["centroids"][:2] <= theirs[:, :2].max(0).values + 1e-6).all())
    assert torch.equal(found["centroids"][2], old[2]) and found["exist"].tolist() == [1, 1, 1]
    assert_close(found["centroids"][1], theirs[:, 1].mean(0), 1e-6)
    order = torch.randperm(4, generator=generator)
    assert_close(aligned(old, exist, theirs[order], known)["centroids"], found["centroids"], 1e-6)
    opposed = aligned(old, exist, torch.cat([theirs, -theirs]), known.repeat(2, 1))
    assert_close(opposed["centroids"][0], found["centroids"][0], 1e-6)


def test_inv_rofl_5_with_all_samples_and_no_terms_it_is_federated_averaging_until_labels_are_replaced() -> None:
    off = {"forget_rate": 0.0, "centroid_weight": 0.0, "entropy_weight": 0.0}
    for mode in ("looped", "vectorized"):
        ours, theirs = toy_of(RoFL(**off), mode=mode), toy_of(FedAvg(), mode=mode)
        for cohort in COHORTS[1:]:
            assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_rofl_6_a_class_that_no_client_has_stays_without_a_centroid() -> None:
    toy = toy_of(RoFL(**SHORT), dataset=labelled([0, 0, 1, 1, 1], [1, 0, 0]))
    for _ in range(3):
        toy.step([0, 1])
    assert toy.server["exist"].tolist() == [1, 1, 0] and not toy.server["centroids"][2].any()


def test_inv_rofl_7_the_course_rises_to_its_end() -> None:
    method = RoFL(forget_rate=0.3, forget_rounds=3, pseudo_from=4, centroid_weight=2.0)
    course = [method.course_of_training(t) for t in range(6)]
    assert [one["kept"] for one in course] == pytest.approx([1, 0.9, 0.8, 0.7, 0.7, 0.7])
    assert [one["pull"] for one in course] == pytest.approx([0.5, 1, 1.5, 2, 2, 2])
    assert RoFL(forget_rounds=0, pseudo_from=0).course_of_training(0) == {"kept": 0.8, "pull": 1.0}


def test_what_travels() -> None:
    toy = toy_of(RoFL(**SHORT))
    toy.step([0, 2])
    size, centroids = num_bytes(toy.server["model"]), num_bytes({"centroids": toy.server["centroids"]}) + 3 * 8
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size + centroids, size + centroids))


@pytest.mark.parametrize("aggregation", [pytest.param("samples", marks=pytest.mark.slow), "population"])
def test_private_layers_stay_with_the_clients(aggregation: Any) -> None:
    train = TRAIN.model_copy(update={"private_norm": "all"})
    method = RoFL(**SHORT, aggregation=aggregation)
    toys = [toy_of(method, train, task=normalized_layers(), mode=mode) for mode in ("looped", "vectorized")]
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)


def test_what_is_refused_and_remarked() -> None:
    clipped = toy_of(RoFL(), TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    with pytest.raises(ConfigError, match=r"RoFL adds up over its local steps .* or choose another method"):
        clipped.algorithm.check(clipped.task, clipped.context)
    context = toy_of(RoFL()).context
    assert "pseudo_from is 10, but the run has 5 rounds" in RoFL().remarks(context)[0]
    assert not RoFL(pseudo_from=4).remarks(context)
    assert len(RoFL(forget_rate=0, forget_rounds=2).idle_settings()) == 1
