"""CReFF: invariants CREFF of gradients by class, learned features and retraining; whole rounds by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.creff import CReFF, class_gradients, feature_gradients, gradient_distances
from algorithms.fedavg import FedAvg
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import TRAIN, initial, labelled, partly_fixed, take, three_layers, vectors
from tests.support.toy_networks import DoubleNetwork, SoftmaxRegression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

THREE = TRAIN.model_copy(update={"rounds": 3, "lr_decay": 1.0})
WIDTH, CLASSES = 7, 3
UNEQUAL = ([0, 1] * 9, [1] * 7 + [2] * 4, [2, 0, 2, 2, 1] * 2, [0, 0, 1])
"""Clients of 18, 11, 10 and 3 samples, of which three lack a class."""
COHORTS = ([0, 3], [1, 2, 3], [0, 1])
"""In the first one nobody has class 2."""
HEAD = ("head.weight", "head.bias")
FEW: dict[str, Any] = {"features_per_class": 4, "match_steps": 5, "retrain_epochs": 3, "retrain_batch_size": 5}


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*UNEQUAL), **{"task": two_layers(), "train": THREE, **options})


def features_of(model: Tree, x: Tensor) -> Tensor:
    return F.linear(x, model["inner.weight"], model["inner.bias"]).relu()


def gradients(head: Tree, features: Tensor, label: int, create: bool = False) -> list[Tensor]:
    """The gradient of the mean cross-entropy in weight and bias, by autograd."""
    w, b = (head[name].detach().clone().requires_grad_() for name in HEAD)
    loss = F.cross_entropy(features @ w.T + b, torch.full((len(features),), label))
    return list(torch.autograd.grad(loss, [w, b], create_graph=create))


def distance(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """D, term by term."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        total = total + 1 - (a @ b) / (a.norm() * b.norm() + 1e-6)
    return total


class Oracle:
    """The server and its clients in plain PyTorch."""

    def __init__(self, toy: Toy, rates: tuple[float, float]) -> None:
        self.toy, self.rates = toy, rates
        self.model = initial(toy)
        self.head = take(self.model, HEAD)
        self.features = toy.server["features"].clone()

    def trained(self, part: Any, batches: Any) -> Tree:
        inner, head = nn.Linear(5, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()
        network = nn.Sequential(inner, nn.ReLU(), head)
        network.load_state_dict(dict(zip(network.state_dict(), self.model.values(), strict=True)))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), batches).batches(CPU):
            optimizer.zero_grad()
            F.cross_entropy(network(part.x[index]), part.y[index]).backward()
            optimizer.step()
        return dict(zip(self.model, (leaf.detach() for leaf in network.state_dict().values()), strict=True))

    def round(self, cohort: list[int], number: int, uniform: bool) -> None:
        streams = self.toy.context.streams
        parts = {client: self.toy.dataset.load(client)["train"] for client in cohort}
        sent: dict[int, list[list[Tensor]]] = {label: [] for label in range(CLASSES)}
        for part in parts.values():
            for label in set(part.y.tolist()):
                sent[label].append(gradients(self.head, features_of(self.model, part.x[part.y == label]), label))
        replies = [self.trained(parts[k], streams.generator("batches", number, k)) for k in cohort]
        sizes = [1 if uniform else len(parts[k].y) for k in cohort]
        self.model = {
            name: sum(size * reply[name] for size, reply in zip(sizes, replies, strict=True)) / sum(sizes)
            for name in self.model
        }
        means = {
            label: [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
            for label, found in sent.items() if found
        }  # fmt: skip
        moving = nn.Parameter(self.features.clone())
        optimizer = torch.optim.SGD([moving], lr=self.rates[0])
        for _ in range(5):
            optimizer.zero_grad()
            found = {label: gradients(self.head, moving[label], label, True) for label in means}
            sum(distance(found[label], means[label]) for label in means).backward()
            optimizer.step()
        self.features = moving.detach()
        fresh = self.toy.task.network.initialize(streams.integer("init.retrained", number))
        head = nn.Linear(WIDTH, CLASSES).double()
        head.load_state_dict({name.partition(".")[2]: fresh[name] for name in HEAD})
        optimizer = torch.optim.SGD(head.parameters(), lr=self.rates[1])
        x, y = self.features.flatten(0, 1), torch.arange(CLASSES).repeat_interleave(4)
        for index in plan_batches(12, 5, 3 * 3, streams.generator("batches.retraining", number, -1)).batches(CPU):
            optimizer.zero_grad()
            F.cross_entropy(head(x[index]), y[index]).backward()
            optimizer.step()
        self.head = {f"head.{name}": leaf.detach() for name, leaf in head.state_dict().items()}


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_inv_creff_1_rounds_are_those_of_an_oracle_in_plain_pytorch(aggregation: Any) -> None:
    toy = several(CReFF(**FEW, aggregation=aggregation, feature_lr=0.3, retrain_lr=0.2))
    oracle = Oracle(toy, (0.3, 0.2))
    for number, cohort in enumerate(COHORTS):
        before = toy.server["features"].clone()
        toy.step(cohort)
        oracle.round(cohort, number, aggregation == "uniform")
        for key, expected in (("model", oracle.model), ("features", oracle.features), ("retrained", oracle.head)):
            assert_close(toy.server[key], expected, 1e-12)
        if number == 0:
            assert torch.equal(toy.server["features"][2], before[2]), "nobody has had class 2"
            assert (toy.server["features"][:2] != before[:2]).any()


def test_inv_creff_2_gradients_are_those_of_autograd_and_absent_classes_have_none() -> None:
    network, generator = two_layers().network, torch.Generator().manual_seed(1)
    head = take(network.initialize(0), HEAD)
    z = torch.randn(9, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 0, 2, 2, 2, 0, 2, 2, 0])
    found = class_gradients(network, head, z, y)
    for label in (0, 2):
        for name, expected in zip(HEAD, gradients(head, z[y == label], label), strict=True):
            assert_close(found[name][label], expected, 1e-12)
    assert not any(found[name][1].any() for name in HEAD)
    equal = torch.stack([z[:3], z[3:6], z[6:]])
    other = feature_gradients(network, head, equal)
    for label in range(3):
        for name, expected in zip(HEAD, gradients(head, equal[label], label), strict=True):
            assert_close(other[name][label], expected, 1e-12)
    assert_close(
        other, class_gradients(network, head, equal.flatten(0, 1), torch.arange(3).repeat_interleave(3)), 1e-12
    )


def test_inv_creff_3_the_distance_is_zero_for_parallel_gradients_and_no_larger_than_two_a_term() -> None:
    network, generator = two_layers().network, torch.Generator().manual_seed(2)
    head = take(network.initialize(0), HEAD)
    z = torch.randn(3, 4, WIDTH, generator=generator, dtype=torch.float64)
    one = feature_gradients(network, head, z)
    longer = {name: 100 * leaf for name, leaf in one.items()}
    against = {name: -100 * leaf for name, leaf in one.items()}
    assert gradient_distances(longer, longer).abs().max() < 1e-6
    assert_close(gradient_distances(longer, against), torch.full((3,), 2.0 * (CLASSES + 1), dtype=torch.float64), 1e-6)
    assert_close(gradient_distances(one, {n: torch.zeros_like(leaf) for n, leaf in one.items()}),
                 torch.full((3,), CLASSES + 1.0, dtype=torch.float64), 1e-12)  # fmt: skip


def test_features_come_nearer_to_the_clients_gradients() -> None:
    distances = []
    for steps in (0, 60):
        toy = several(CReFF(**{**FEW, "match_steps": steps, "feature_lr": 0.1}))
        head, model = toy.server["retrained"], toy.server["model"]
        toy.step([0, 1, 2, 3])
        found = feature_gradients(toy.task.network, head, toy.server["features"])
        total = 0.0
        for label in range(CLASSES):
            parts = [toy.dataset.load(client)["train"] for client in range(4)]
            have = [part for part in parts if (part.y == label).any()]
            each = [gradients(head, features_of(model, part.x[part.y == label]), label) for part in have]
            means = [torch.stack(one).mean(0) for one in zip(*each, strict=True)]
            total += float(distance([found[name][label] for name in HEAD], means))
        distances.append(total)
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_creff_4_training_is_that_of_federated_averaging(make: Any) -> None:
    data = random_clients((8, 12, 6, 10))
    plain, ours = (Toy(one, data, make(), TRAIN) for one in (FedAvg(), CReFF(**FEW)))
    for cohort in ([0, 2], [1, 2], [0, 1], [1, 2]):
        plain.step(cohort)
        ours.step(cohort)
        assert_equal(ours.server["model"], plain.server["model"])
        assert vectors(ours.scores(), "global") == vectors(plain.scores(), "global")
        assert vectors(ours.scores(), "retrained") != vectors(plain.scores(), "global")


def test_inv_creff_5_features_stay_without_steps_and_the_layer_is_drawn_again_in_every_round() -> None:
    toy = several(CReFF(**{**FEW, "match_steps": 0, "retrain_epochs": 0}))
    before, heads = toy.server["features"].clone(), []
    for cohort in COHORTS[:2]:
        heads.append(toy.step(cohort)["retrained"])
        assert torch.equal(toy.server["features"], before)
    assert all((heads[0][name] != heads[1][name]).any() for name in HEAD)
    streams = toy.context.streams
    assert_equal(heads[1], take(toy.task.network.initialize(streams.integer("init.retrained", 1)), HEAD))


def test_inv_creff_6_what_travels() -> None:
    toy = several(CReFF(**FEW))
    model = sum(leaf.numel() for leaf in initial(toy).values())
    head = CLASSES * WIDTH + CLASSES
    for cohort in COHORTS:
        toy.step(cohort)
        up = model + CLASSES * head + CLASSES
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * (model + head), 8 * up))
    assert set(toy.algorithm.sent(toy.server)) == {"model", "retrained"} and not toy.states()


def test_models_that_are_scored_have_one_body_and_two_last_layers() -> None:
    toy = several(
        CReFF(**FEW, finetune_epochs=1, finetune_lr=0.0), train=THREE.model_copy(update={"weight_decay": 0.0})
    )
    toy.run()
    scores, model = toy.scores(final=True), toy.server["model"]
    assert vectors(scores, "finetuned") == vectors(scores, "retrained") != vectors(scores, "global")
    for client in range(4):
        test = toy.dataset.load(client)["test"]
        for row, head in (("global", model), ("retrained", toy.server["retrained"])):
            z = features_of(model, test.x) @ head["head.weight"].T + head["head.bias"]
            assert scores[client][row].loss == pytest.approx(float(F.cross_entropy(z, test.y)), rel=1e-12)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (several(CReFF(**FEW), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)


def test_a_last_layer_that_is_not_trained_and_a_model_without_a_body_are_refused() -> None:
    context = several(CReFF()).context
    with pytest.raises(ConfigError, match=r"'head\.bias' has requires_grad=False"):
        CReFF().check(partly_fixed("head.bias"), context)
    with pytest.raises(ConfigError, match="no layer before it"):
        CReFF().check(Classification(DoubleNetwork(SoftmaxRegression)), context)
