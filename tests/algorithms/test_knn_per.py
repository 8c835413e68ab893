"""kNN-Per: invariants KNN, the vote by hand, both kernels and mixtures, capacity, and what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.knn_per import KnnPer, Neighbours
from algorithms.parts.lines import GRID
from rayfl.engine.updates.settings import TrainConfig
from rayfl.randomness import RandomStreams
from tests.support.partial_toys import planted_clients
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
KERNELS = pytest.mark.parametrize("kernel", ["gaussian", "laplace"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def some_features(count: int, seed: int, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_labels(count: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(9))


def by_hand(keys: Tensor, labels: Tensor, x: Tensor, k: int, sigma: float, kernel: str) -> Tensor:
    shares = torch.zeros(3, dtype=torch.float64)
    for distance, j in sorted((float((x - key).norm()), j) for j, key in enumerate(keys))[:k]:
        cost = distance**2 / (sigma * keys.shape[1]) if kernel == "gaussian" else distance / sigma
        shares[labels[j]] += torch.exp(torch.tensor(-cost, dtype=torch.float64))
    return shares / shares.sum()


@pytest.mark.parametrize("options", [{}, {"neighbours": 1, "kernel_scale": 3.0}, {"mix": "logits", "capacity": 0.5}])
def test_inv_knn_1_training_is_fedavg(options: dict[str, Any]) -> None:
    voting, plain = toy_of(KnnPer(**options)), toy_of(FedAvg())
    for _ in range(TRAIN.rounds):
        assert_equal(voting.step(), plain.step())
    found, expected = voting.scores(final=True), plain.scores(final=True)
    for client, rows in expected.items():
        assert found[client]["global"].vector.tolist() == rows["global"].vector.tolist()


@pytest.mark.parametrize("mix", ["probabilities", "logits"])
def test_inv_knn_2_lambda_0_is_the_model(mix: Any) -> None:
    toy = toy_of(KnnPer(mix=mix))
    toy.run()
    for rows in toy.scores().values():
        assert rows["lambda=0.0"].vector.tolist() == rows["global"].vector.tolist()
        assert list(rows) == ["global", *(f"lambda={value}" for value in GRID)]


@pytest.mark.parametrize("mix", ["probabilities", "logits"])
def test_inv_knn_3_the_nearest_training_sample_is_a_training_samples_own(mix: Any) -> None:
    # the toys' test parts repeat the training parts
    toy = toy_of(KnnPer(neighbours=1, mix=mix))
    toy.run()
    for rows in toy.scores().values():
        assert rows["lambda=1.0"].top1 == 1
        assert rows["lambda=0.0"].top1 < 1


@KERNELS
def test_inv_knn_4_equal_features_vote_by_class_frequency(kernel: Any) -> None:
    labels = torch.tensor([0, 2, 2, 1, 2])
    voters = Neighbours(torch.ones(5, 4).double(), labels, 3, count=10, scale=1.0, kernel=kernel)
    expected = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64).repeat(7, 1)
    assert_close(voters.shares(some_features(7, 1)), expected, 1e-12)


@KERNELS
def test_inv_knn_5_shares_sum_to_one_also_far_away(kernel: Any) -> None:
    voters = Neighbours(some_features(20, 0), some_labels(20), 3, count=5, scale=0.01, kernel=kernel)
    for scale in (1.0, 1e4):
        shares = voters.shares(some_features(300, 1) * scale)
        assert torch.isfinite(shares).all() and bool((shares >= 0).all())
        assert_close(shares.sum(1), torch.ones(300, dtype=torch.float64), 1e-6)


@KERNELS
def test_inv_knn_6_the_order_of_the_datastore_does_not_matter(kernel: Any) -> None:
    keys, labels, order = some_features(20, 0), some_labels(20), torch.randperm(20)
    one, other = (
        Neighbours(k, y, 3, 5, 1.0, kernel).shares(some_features(6, 1))
        for k, y in ((keys, labels), (keys[order], labels[order]))
    )
    assert_close(one, other, 1e-12)


@KERNELS
def test_inv_knn_7_translated_features_vote_alike(kernel: Any) -> None:
    keys, labels, x = some_features(20, 0), some_labels(20), some_features(6, 1)
    shift = 10 * some_features(1, 2)
    one, other = (Neighbours(k, labels, 3, 5, 1.0, kernel).shares(y) for k, y in ((keys, x), (keys + shift, x + shift)))
    assert_close(one, other, 1e-6)


@KERNELS
def test_inv_knn_8_of_an_endless_scale_the_majority_counts(kernel: Any) -> None:
    keys, labels, x = some_features(20, 0), some_labels(20), some_features(6, 1)
    shares = Neighbours(keys, labels, 3, 5, 1e12, kernel).shares(x)
    for found, point in zip(shares, x, strict=True):
        nearest = (keys - point).norm(dim=1).argsort()[:5]
        assert_close(found, torch.bincount(labels[nearest], minlength=3).double() / 5, 1e-9)


def test_inv_knn_9_evaluation_leaves_no_state() -> None:
    toy = toy_of(KnnPer())
    toy.step()
    toy.scores()
    assert toy.states() == {}


@KERNELS
def test_the_vote_is_that_of_the_paper(kernel: Any) -> None:
    keys, labels, x = some_features(20, 0), some_labels(20), some_features(6, 1)
    shares = Neighbours(keys, labels, 3, 5, 0.7, kernel).shares(x)
    for found, point in zip(shares, x, strict=True):
        assert_close(found, by_hand(keys, labels, point, 5, 0.7, kernel), 1e-12)


def test_of_equally_near_samples_the_first_vote() -> None:
    voters = Neighbours(torch.zeros(4, 2).double(), torch.tensor([2, 0, 1, 0]), 3, 2, 1.0)
    assert_close(voters.shares(torch.ones(1, 2).double())[0], torch.tensor([0.5, 0.0, 0.5]).double(), 1e-12)


@pytest.mark.parametrize("mix", ["probabilities", "logits"])
def test_rows_are_mixtures_of_model_and_vote(mix: Any) -> None:
    toy = toy_of(KnnPer(neighbours=3, mix=mix, kernel_scale=0.3))
    toy.run()
    network, model = toy.task.network, toy.server["model"]
    examples = toy.dataset.load(1)["train"]
    features, logits = network.head_inputs_and_logits(model, examples.x)
    votes = Neighbours(features, examples.y, 3, 3, 0.3).shares(features)
    rows = toy.scores()[1]
    for value in GRID[1:]:
        start = logits if mix == "logits" else logits.softmax(-1)
        mixed = (1 - value) * start + value * votes
        predicted = mixed.log_softmax(-1) if mix == "logits" else mixed.log()
        loss = -predicted.gather(1, examples.y[:, None]).mean()
        assert rows[f"lambda={value}"].loss == pytest.approx(float(loss), abs=1e-9)


def test_losses_are_finite_where_a_class_has_no_vote() -> None:
    x = some_features(6, 0, 5)
    data = ListDataset([(x, torch.zeros(6).long())], 3, validation=[(x, torch.ones(6).long())])
    toy = toy_of(KnnPer(), dataset=data, train=TRAIN.model_copy(update={"clients_per_round": 1}))
    toy.run()
    found = toy.scores(split="validation")[0]["lambda=1.0"]
    assert found.top1 == 0 and 100 < found.loss < 1000


def test_capacity_keeps_the_same_samples_in_every_evaluation() -> None:
    toy = toy_of(KnnPer(capacity=0.5, neighbours=1))
    toy.step()
    whole = toy_of(KnnPer(neighbours=1))
    whole.step()
    first, second = toy.scores(), toy.scores()
    for client, rows in first.items():
        assert rows["lambda=1.0"].vector.tolist() == second[client]["lambda=1.0"].vector.tolist()
    assert sum(rows["lambda=1.0"].top1 for rows in first.values()) < sum(
        rows["lambda=1.0"].top1 for rows in whole.scores().values()
    )
    # of 9 samples half, rounded down, are kept: by hand
    kept = torch.from_numpy(RandomStreams(0).generator("datastore", client=0).permutation(9)[:4]).sort().values
    part = toy.dataset.load(0)["train"]
    keys = toy.task.network.head_inputs_and_logits(toy.server["model"], part.x)[0]
    nearest = kept[torch.cdist(keys, keys[kept]).argmin(1)]
    assert first[0]["lambda=1.0"].top1 == float((part.y[nearest] == part.y).sum()) / 9


def test_batches_of_an_evaluation_do_not_mix() -> None:
    """As many rows as there are, the memory of one batch must not answer for another."""
    data = random_clients([700, 600], seed=4)
    toy = toy_of(KnnPer(), dataset=data)
    toy.step()
    examples = data.load(0)["train"]
    features, _ = toy.task.network.head_inputs_and_logits(toy.server["model"], examples.x)
    votes = Neighbours(features, examples.y, 3, 10, 1.0).shares(features)
    right = float((votes.argmax(1) == examples.y).double().mean())
    assert toy.scores()[0]["lambda=1.0"].top1 == pytest.approx(right, abs=2e-3)


@pytest.mark.slow
def test_clients_with_rules_of_their_own_are_served_better_by_their_samples() -> None:
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
    toy = Toy(KnnPer(), planted_clients("head", samples=60), two_layers(12, 8), train)
    toy.run()
    rows = toy.scores(split="validation").values()
    best = max(sum(found[f"lambda={value}"].top1 for found in rows) for value in GRID)
    assert best / 8 > sum(found["global"].top1 for found in rows) / 8 + 0.05
