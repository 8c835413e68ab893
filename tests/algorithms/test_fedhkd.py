"""FedHKD: an oracle in plain PyTorch, federated averaging, means by class, noise, messages, both modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedhkd import FedHKD, largest_sizes, lengths
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, labelled, three_layers, toy_of, vectors
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

HIDDEN, CLASSES = 7, 3
Knowledge = dict[int, tuple[Tensor, Tensor]]


def features_of(model: Tree, x: Tensor) -> Tensor:
    return torch.relu(x @ model["inner.weight"].T + model["inner.bias"])


def logits_of(model: Tree, features: Tensor) -> Tensor:
    logits: Tensor = features @ model["head.weight"].T + model["head.bias"]
    return logits


def loss_of(model: Tree, known: Knowledge, x: Tensor, y: Tensor, method: FedHKD) -> Tensor:
    """The objective, sample by sample and class by class."""
    features = features_of(model, x)
    total = F.cross_entropy(logits_of(model, features), y)
    for mean, said in known.values():
        own = F.softmax(logits_of(model, mean) / method.temperature, -1)
        total = total + method.prediction_weight * torch.dist(own, said) / len(known)
    for i, label in enumerate(y.tolist()):
        if label in known:
            total = total + method.feature_weight * torch.dist(features[i], known[label][0]) / len(y)
    return total


SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"prediction_weight": 0.5, "feature_weight": 0.3},
    "predictions": {"prediction_weight": 2.0, "feature_weight": 0.0, "temperature": 2.0, "aggregation": "uniform"},
    "features": {"prediction_weight": 0.0, "feature_weight": 0.7, "aggregation": "population"},
    "frequent": {"prediction_weight": 0.5, "feature_weight": 0.3, "least_share": 0.4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_hkd_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedHKD(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model, known = initial(toy), Knowledge()
    kept: dict[int, Tree] = {}
    for round, cohort in enumerate([*COHORTS, [0, 1, 2, 3]]):
        counted = list(range(4)) if method.aggregation == "population" else cohort
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in counted}
        rest = 1 - sum(sizes[k] for k in cohort) / sum(sizes.values())
        mean, seen = {key: rest * leaf for key, leaf in model.items()}, dict[int, list[tuple[Tensor, Tensor]]]()
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            n = len(part.y)
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, client)
            for index in plan_batches(n, 4, 2 * -(-n // 4), generator).batches(CPU):
                optimizer.zero_grad()
                loss = loss_of(leaves, known, part.x[index], part.y[index], method)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            kept[client] = {key: leaf.detach() for key, leaf in leaves.items()}
            mean = {key: mean[key] + sizes[client] / sum(sizes.values()) * kept[client][key] for key in mean}
            features = features_of(kept[client], part.x)
            said = F.softmax(logits_of(kept[client], features) / method.temperature, -1)
            for label in range(CLASSES):
                own = part.y == label
                if own.any() and own.sum() >= method.least_share * n:
                    seen.setdefault(label, []).extend(zip(features[own], said[own], strict=True))
        model = mean
        for label, pairs in seen.items():
            known[label] = (torch.stack([f for f, _ in pairs]).mean(0), torch.stack([q for _, q in pairs]).mean(0))
        server = toy.step(cohort)
        assert_close(server["model"], model, 1e-12)
        assert server["knowledge"]["exist"].tolist() == [float(label in known) for label in range(CLASSES)]
        for label, (centre, said) in known.items():
            assert_close(server["knowledge"]["features"][label], centre, 1e-12)
            if method.prediction_weight:
                assert_close(server["knowledge"]["predictions"][label], said, 1e-12)
    assert_close({client: state["personal"] for client, state in toy.states().items()}, kept, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_hkd_2_without_both_distances_the_models_mean_is_federated_averagings(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedHKD(prediction_weight=0, feature_weight=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client


def test_inv_hkd_3_the_first_round_is_federated_averagings() -> None:
    ours, theirs = toy_of(FedHKD(prediction_weight=9.0, feature_weight=9.0)), toy_of(FedAvg())
    assert_equal(ours.step([0, 1, 2])["model"], theirs.step([0, 1, 2])["model"])


def test_inv_hkd_4_at_its_own_hyper_knowledge_a_model_has_the_plain_gradient() -> None:
    """One sample a class, so that a class's means are those of the sample: both distances are 0, without a slope."""
    task = two_layers()
    part = labelled([0, 1, 2]).load(0)["train"]
    model = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(2).items()}
    method, batch = FedHKD(prediction_weight=5.0, feature_weight=5.0), Batch(part.x, part.y)
    features = features_of(model, part.x).detach()
    said = F.softmax(logits_of(model, features) / method.temperature, -1).detach()
    known = {"features": features, "predictions": said, "exist": torch.ones(3).double()}
    found = torch.autograd.grad(method.objective(model, batch, task, known, None), list(model.values()))
    plain = torch.autograd.grad(FedAvg().objective(model, batch, task), list(model.values()))
    assert_close(dict(zip(model, found, strict=True)), dict(zip(model, plain, strict=True)), 1e-12)


def test_inv_hkd_5_a_class_that_the_cohort_lacks_keeps_its_knowledge() -> None:
    toy = Toy(FedHKD(), labelled([0, 0, 1, 1], [1, 2, 2, 2]), two_layers(), TRAIN)
    assert toy.step([0])["knowledge"]["exist"].tolist() == [1, 1, 0]
    before = toy.server["knowledge"]
    after = toy.step([1])["knowledge"]
    assert after["exist"].tolist() == [1, 1, 1]
    for name in ("features", "predictions"):
        assert torch.equal(after[name][0], before[name][0]) and not torch.equal(after[name][1], before[name][1])
    assert_close(after["predictions"].sum(1), torch.ones(3).double(), 1e-12)


def test_noise_is_on_mean_features_alone_and_as_wide_as_one_sample_can_move_them() -> None:
    still, noisy = (toy_of(FedHKD(noise=noise), task=two_layers()) for noise in (0.0, 0.5))
    plain, moved = still.step([1]), noisy.step([1])
    assert_equal(plain["model"], moved["model"])
    assert_equal(plain["knowledge"]["predictions"], moved["knowledge"]["predictions"])
    part = still.dataset.load(1)["train"]
    features = features_of(still.states()[1]["personal"], part.x)
    drawn = still.context.streams.generator("knowledge", 0, 1).standard_normal((CLASSES, HIDDEN))
    for label in range(CLASSES):
        own = features[part.y == label]
        wide = 0.5 * 2 * own.abs().max(0).values / len(own) if len(own) else 0
        expected = plain["knowledge"]["features"][label] + wide * torch.from_numpy(drawn[label])
        assert_close(moved["knowledge"]["features"][label], expected, 1e-12)


def test_lengths_and_largest_sizes() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    found = lengths(rows)
    assert found.tolist() == [5, 0]
    assert torch.autograd.grad(found.sum(), rows)[0].tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, 0]]
    sizes = largest_sizes(torch.tensor([[1.0, -3.0], [-2.0, 1.0], [5.0, 0.0]]), torch.tensor([1, 1, 2]), 3)
    assert sizes.tolist() == [[0, 0], [2, 3], [5, 0]]


def test_what_travels_and_what_stays() -> None:
    toy = toy_of(FedHKD(), task=two_layers())
    size = num_bytes(initial(toy)) + 8 * CLASSES * (HIDDEN + CLASSES + 1)
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    features = toy_of(FedHKD(prediction_weight=0), task=two_layers())
    features.step([0])
    assert features.federation.traffic.by_client == {0: (size - 8 * CLASSES**2, size - 8 * CLASSES**2)}
    assert {key for state in toy.states().values() for key in state} == {"personal"}
    # a client never sampled has the global model
    scores = toy.scores()
    assert vectors(scores, "personalized")[3] == vectors(scores, "global")[3]
    assert vectors(scores, "personalized")[1] != vectors(scores, "global")[1]


@pytest.mark.parametrize("options", [{}, {"aggregation": "uniform", "noise": 0.1}])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    algorithm = FedHKD(**{"prediction_weight": 0.5, "feature_weight": 0.3, **options})
    assert_modes_agree(algorithm, SIZES, TRAIN, double, 1e-10 if double else 1e-4)


def test_a_whole_batch_of_clients_of_different_sizes_agrees_in_both_modes() -> None:
    train = TRAIN.model_copy(update={"batch_size": None})
    assert_modes_agree(FedHKD(prediction_weight=0.5, feature_weight=0.3), (9, 12, 1, 10), train, True, 1e-10)


def test_what_is_refused_and_what_is_idle() -> None:
    for options in ({"prediction_weight": -1}, {"temperature": 0}, {"least_share": 1}, {"noise": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            FedHKD(**options)
    said = FedHKD(prediction_weight=0, feature_weight=0, noise=1.0, temperature=1.0).idle_settings()
    assert len(said) == 2
