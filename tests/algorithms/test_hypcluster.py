"""HypCluster: invariants HYP, both choices, traffic, fine-tuning, and clients that disagree in two camps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.hypcluster import HypCluster
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Batch
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

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


class LikelyQuadratic(Quadratic):
    """QUAD whose log-probability of a sample's label is minus its loss."""

    def predictions(self, models: Sequence[Mapping[str, Tensor]], x: Tensor) -> Tensor:
        losses = 0.5 * ((models[0]["theta"] - x) ** 2).sum(-1)
        return torch.stack([-losses, -losses - 1], 1)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, make: Any = two_layers, **options: Any) -> Toy:
    return Toy(algorithm, options.pop("dataset", random_clients(SIZES)), make(), train, **options)


def loss_of(toy: Toy, client: int, model: Tree) -> float:
    part = toy.dataset.load(client)["train"]
    return float(toy.task.cross_entropy(toy.task.network.logits(model, part.x), Batch(part.x, part.y)))


def best_of(toy: Toy, client: int) -> str:
    """The choice that the losses dictate."""
    losses = [loss_of(toy, client, toy.server["models"][str(j)]) for j in range(len(toy.server["models"]))]
    return str(int(np.argmin(losses)))


def choices(toy: Toy, clients: Sequence[int]) -> dict[int, str]:
    """The group that each client names in a round; the round has no effect."""
    groups = {}
    for client in clients:
        (trained,) = toy.federation.means(toy.algorithm.local_update, [client], {"models": toy.server["models"]})  # type: ignore[attr-defined]
        groups[client] = trained
    return groups


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("policy", ["samples", "uniform"])
def test_inv_hyp_1_one_model_is_fedavg(policy: Any, make: Any) -> None:
    one, plain = (
        toy_of(algorithm, make=make)
        for algorithm in (HypCluster(clusters=1, aggregation=policy), FedAvg(aggregation=policy))
    )
    assert_equal(one.server["models"]["0"], plain.server["model"])
    for _ in range(TRAIN.rounds):
        assert_equal(one.step()["models"]["0"], plain.step()["model"])
    left, right = one.scores(), plain.scores()
    for client in range(4):
        assert (left[client]["personalized"].vector == right[client]["global"].vector).all()


def test_inv_hyp_2_of_equal_models_everybody_takes_the_first() -> None:
    toy = toy_of(HypCluster(clusters=3))
    first = toy.server["models"]["0"]
    toy.server = {"models": {str(j): copy(first) for j in range(3)}}
    plain = toy_of(FedAvg())
    assert set(choices(toy, range(4)).values()) == {"0"}
    after = toy.step([0, 1, 3])["models"]
    assert_equal(after["0"], plain.step([0, 1, 3])["model"])
    for j in ("1", "2"):
        assert_equal(after[j], first)


def test_initial_models_differ() -> None:
    models = toy_of(HypCluster(clusters=4)).server["models"]
    assert list(models) == ["0", "1", "2", "3"]
    weights = [models[j]["inner.weight"] for j in models]
    for i, one in enumerate(weights):
        for other in weights[:i]:
            assert (one - other).abs().min() > 0


@pytest.mark.parametrize("clusters", [2, 5])
def test_inv_hyp_3_and_4_everybody_is_in_the_cluster_of_least_loss_and_in_no_other(clusters: int) -> None:
    toy = toy_of(HypCluster(clusters=clusters), dataset=random_clients(SIZES, seed=1))
    seen = set()
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2, 3]):
        chosen = choices(toy, cohort)
        assert chosen == {client: best_of(toy, client) for client in cohort}
        members = {j: [client for client in cohort if chosen[client] == j] for j in toy.server["models"]}
        assert sum(map(len, members.values())) == len(cohort)
        before = copy(toy.server["models"])
        toy.step(cohort)
        for j, who in members.items():
            if not who:
                assert_equal(toy.server["models"][j], before[j])
                continue
            plain = toy_of(FedAvg(), dataset=toy.dataset)
            plain.round = toy.round - 1
            plain.server = {"model": before[j]}
            assert_equal(toy.server["models"][j], plain.step(who)["model"])
            seen.add(j)
    assert len(seen) > 1


@pytest.mark.slow
def test_inv_hyp_5_each_model_converges_to_the_mean_of_its_group() -> None:
    points, copies = [-1.0, -3.0, 4.0, 6.0, 8.0], [3, 1, 2, 1, 1]
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=None, lr=0.2)
    toy = Toy(HypCluster(), quadratic_clients(points, copies), LikelyQuadratic(), train)
    start = toy.server["models"]["0"]
    toy.server = {
        "models": {"0": map_leaves(lambda leaf: leaf - 2, start), "1": map_leaves(lambda leaf: leaf + 2, start)}
    }
    found = toy.run()["models"]
    assert abs(float(found["0"]["theta"]) - (-1.5)) < 1e-9
    assert abs(float(found["1"]["theta"]) - 5.5) < 1e-9


def test_clients_never_sampled_take_the_model_that_fits_them() -> None:
    toy = toy_of(HypCluster(clusters=3))
    for _ in range(3):
        toy.step([0, 1])
    scores = toy.scores()
    for client in range(4):
        expected = loss_of(toy, client, toy.server["models"][best_of(toy, client)])
        assert math.isclose(scores[client]["personalized"].loss, expected, rel_tol=1e-9)
        assert set(scores[client]) == {"personalized"}


def test_choice_by_accuracy_is_on_validation_samples_where_there_are_any() -> None:
    x = torch.tensor([[1.0, 0, 0, 0, 0]], dtype=torch.float64)
    zero, one = torch.tensor([0]), torch.tensor([1])
    parts = [(x, zero)] * 2
    dataset = ListDataset(parts, validation=[(x, one), (x[:0], zero[:0])])
    toys = [toy_of(HypCluster(choice=c), dataset=dataset, make=softmax_regression) for c in ("loss", "accuracy")]  # type: ignore[arg-type]
    for toy in toys:
        models = {str(j): map_leaves(torch.zeros_like, toy.server["models"]["0"]) for j in range(2)}
        for j, label in enumerate((0, 1)):
            models[str(j)]["head.bias"] = torch.eye(3, dtype=torch.float64)[label]
        toy.server = {"models": models}
    assert choices(toys[0], [0, 1]) == {0: "0", 1: "0"}
    assert choices(toys[1], [0, 1]) == {0: "1", 1: "0"}


def test_traffic_is_all_models_down_and_one_up() -> None:
    toy = toy_of(HypCluster(clusters=3), hosts=2)
    size = 8 * toy.task.network.num_parameters
    for cohort in ([0, 2], [0, 1, 2, 3]):
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (3 * size, size))


def test_fine_tuning_starts_from_the_chosen_model() -> None:
    none, some = (toy_of(HypCluster(finetune_epochs=epochs)) for epochs in (0, 3))
    for toy in (none, some):
        toy.run()
    kept, tuned = none.scores(final=True), some.scores(final=True)
    for client in range(4):
        assert (kept[client]["finetuned"].vector == kept[client]["personalized"].vector).all()
        assert tuned[client]["finetuned"].loss < tuned[client]["personalized"].loss
    assert all(set(rows) == {"personalized"} for rows in some.scores(final=False).values())


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(HypCluster(clusters=3), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))


@pytest.mark.slow
def test_clients_that_contradict_each_other_in_two_camps_are_told_apart() -> None:
    train = TrainConfig(rounds=15, clients_per_round=6, local_epochs=2, batch_size=10, lr=0.3)
    clustered, plain = (
        Toy(algorithm, ListDataset(two_camps(8)), softmax_regression(), train) for algorithm in (HypCluster(), FedAvg())
    )
    clustered.run()
    plain.run()
    chosen = choices(clustered, range(8))
    assert [chosen[client] for client in range(8)] in (["0", "1"] * 4, ["1", "0"] * 4)
    own = np.mean([rows["personalized"].top1 for rows in clustered.scores().values()])
    shared = np.mean([rows["global"].top1 for rows in plain.scores().values()])
    assert own > 0.9
    assert shared < 0.65
