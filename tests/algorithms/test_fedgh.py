"""FedGH: invariants GH, what the server learns, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedgh import FedGH, head_step
from algorithms.fedper import FedPer
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import ClassificationModel, Network
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import held_out_accuracy, planted_clients
from tests.support.toy_networks import DoubleNetwork, TwoLayers, normalized_layers, two_layers
from tests.support.toys import ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def some_means(count: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 7, generator=generator, dtype=torch.float64), torch.arange(count) % 3


def initial_head(task: Any) -> Tree:
    model = task.network.initialize(5)
    return {name: model[name] for name in task.network.head_names}


def means_of(toy: Toy, model: Tree, client: int) -> dict[int, Tensor]:
    examples = toy.dataset.load(client)["train"]
    features = toy.task.network.head_inputs_and_logits(model, examples.x)[0]
    return {int(y): features[examples.y == y].mean(0) for y in examples.y.unique()}


def test_inv_gh_1_without_a_server_step_the_head_is_constant() -> None:
    still, idle = toy_of(FedGH(server_lr=0)), toy_of(FedGH(server_epochs=0))
    before = copy(still.server["shared"])
    for _ in range(TRAIN.rounds):
        assert_equal(still.step()["shared"], before)
        idle.step()
    assert_equal(still.states(), idle.states())


def test_inv_gh_2_one_batch_of_all_means_is_one_step_whatever_their_order() -> None:
    features, labels = some_means()
    head = initial_head(two_layers())
    order = torch.tensor([4, 1, 8, 0, 7, 2, 3, 6, 5])
    found = [
        FedGH().fitted(head, f, y, 0.3, size, np.random.default_rng(seed))
        for f, y, size, seed in ((features, labels, None, 0), (features[order], labels[order], 9, 3))
    ]
    assert_close(found[0], found[1], 1e-12)
    short = {name.rpartition(".")[2]: leaf for name, leaf in head.items()}
    step = head_step(short, features, labels, 0.3)
    assert_close(found[0], {f"head.{name}": leaf for name, leaf in step.items()}, 1e-12)


def test_the_server_takes_a_step_for_each_mini_batch_of_means() -> None:
    features, labels = some_means()
    head, order = initial_head(two_layers()), np.random.default_rng(3).permutation(9)
    layer = {name.rpartition(".")[2]: leaf for name, leaf in head.items()}
    for chosen in (order[:4], order[4:8], order[8:]):
        layer = head_step(layer, features[chosen], labels[chosen], 0.3)
    found = FedGH().fitted(head, features, labels, 0.3, 4, np.random.default_rng(3))
    assert_close(found, {f"head.{name}": leaf for name, leaf in layer.items()}, 1e-12)


def test_inv_gh_3_the_servers_step_is_the_gradient_of_the_mean_cross_entropy() -> None:
    features, labels = some_means()
    model = {name.rpartition(".")[2]: leaf.requires_grad_() for name, leaf in initial_head(two_layers()).items()}
    loss = F.cross_entropy(F.linear(features, model["weight"], model["bias"]), labels)
    slopes = dict(zip(model, torch.autograd.grad(loss, list(model.values())), strict=True))
    detached = {name: leaf.detach() for name, leaf in model.items()}
    expected = {name: leaf - 0.3 * slopes[name] for name, leaf in detached.items()}
    assert_close(head_step(detached, features, labels, 0.3), expected, 1e-12)
    without = head_step({"weight": detached["weight"]}, features, labels, 0.3)
    assert set(without) == {"weight"}


def test_inv_gh_3_a_round_without_local_training_is_that_step_on_the_initial_bodies_means() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 0, "batch_size": None})
    toy = toy_of(FedGH(server_lr=0.7), train)
    model = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    pairs = [(mean, y) for client in (0, 2) for y, mean in means_of(toy, model, client).items()]
    short = {name.rpartition(".")[2]: leaf for name, leaf in toy.server["shared"].items()}
    step = head_step(short, torch.stack([mean for mean, _ in pairs]), torch.tensor([y for _, y in pairs]), 0.7)
    assert_close(toy.step([0, 2])["shared"], {f"head.{name}": leaf for name, leaf in step.items()}, 1e-12)


def test_without_a_rate_of_its_own_the_server_has_that_of_the_round() -> None:
    train = TRAIN.model_copy(update={"lr_decay": 0.5})
    own, rounds = toy_of(FedGH(), train), toy_of(FedGH(server_lr=train.lr_in(1)), train)
    for toy in (own, rounds):
        toy.round = 1
        toy.step([0, 2])
    assert train.lr_in(1) == 0.5 * train.lr
    assert_equal(own.server["shared"], rounds.server["shared"])


@pytest.mark.parametrize("hidden", [4, 40])
def test_inv_gh_4_only_means_and_marks_are_sent(hidden: int) -> None:
    toy = toy_of(FedGH(), task=two_layers(hidden=hidden))
    head = copy(toy.server["shared"])
    toy.step([0, 1])
    assert toy.federation.traffic.up == 2 * 8 * (3 * hidden + 3)
    assert toy.federation.traffic.down == 2 * num_bytes(head)
    reply = toy.federation.map(toy.algorithm.local_update, [2], {"shared": head})[2]  # type: ignore[attr-defined]
    assert set(reply) == {"means", "exist"}


def test_inv_gh_5_the_body_of_a_client_not_sampled_stays() -> None:
    toy = toy_of(FedGH())
    toy.step([0, 1])
    before = toy.states()
    toy.step([1, 2])
    assert_equal(toy.states()[0], before[0])
    assert not torch.equal(toy.states()[1]["personal"]["inner.weight"], before[1]["personal"]["inner.weight"])


def test_inv_gh_6_all_receive_the_same_head() -> None:
    one = random_clients((8,)).load(0)["train"]
    toy = toy_of(FedGH(), dataset=ListDataset([(one.x, one.y)] * 3), streams=RelabelledStreams(0, (0,) * 3))
    for _ in range(2):
        toy.step([0, 1, 2])
        states = toy.states()
        assert_equal(states[0], states[1])
        assert_equal(states[0], states[2])


def test_inv_gh_7_two_clients_with_equal_means_count_as_one_with_each_mean_twice() -> None:
    features, labels = some_means(3)
    head = initial_head(two_layers())
    once, twice = (
        FedGH().fitted(head, features.repeat(n, 1), labels.repeat(n), 0.3, None, np.random.default_rng(0))
        for n in (1, 2)
    )
    assert_close(once, twice, 1e-12)


def test_the_local_update_is_that_of_local_training_from_the_received_head() -> None:
    toy, alone = toy_of(FedGH()), toy_of(Local())
    toy.step([0, 1])
    alone.step([0, 1])
    for client in (0, 1):
        body = toy.states()[client]["personal"]
        assert_equal(body, {name: alone.states()[client]["local"][name] for name in body})
        assert set(body) == {"inner.weight", "inner.bias"}


def test_means_are_those_of_the_trained_body_by_class() -> None:
    toy, alone = toy_of(FedGH()), toy_of(Local())
    reply = toy.federation.map(toy.algorithm.local_update, [1], {"shared": toy.server["shared"]})[1]  # type: ignore[attr-defined]
    alone.step([1])
    expected = means_of(alone, alone.states()[1]["local"], 1)
    assert {int(y) for y in reply["exist"].nonzero()[:, 0]} == set(expected)
    for y, mean in expected.items():
        assert_close(reply["means"][y], mean, 1e-12)


def test_a_class_that_nobody_has_is_only_pushed_away_from() -> None:
    features, labels = some_means()
    head = {"weight": torch.zeros(4, 7, dtype=torch.float64), "bias": torch.zeros(4, dtype=torch.float64)}
    stepped = head_step(head, features, labels, 1.0)
    assert float(stepped["bias"][3]) < 0
    assert_close(stepped["weight"][3], -features.mean(0) / 4, 1e-12)


def test_buffers_belong_to_the_body() -> None:
    toy = toy_of(FedGH(), task=normalized_layers())
    toy.step([0, 1])
    assert {"norm.running_mean", "norm.running_var", "norm.weight"} <= set(toy.states()[0]["personal"])
    assert set(toy.server["shared"]) == {"head.weight", "head.bias"}


class DeepLayers(ClassificationModel):
    """Three linear layers, of which the last one has another name than those of the others."""

    head_module = "top"
    classifier_modules = ("top",)

    def __init__(self, inputs: int = 7, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.top = nn.Linear(5, 6), nn.Linear(6, inputs), nn.Linear(inputs, 3, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))

    def classify(self, features: Tensor) -> Tensor:
        return self.top(features)  # type: ignore[no-any-return]


def two_architectures(**options: Any) -> Classification:
    """MLP2 and :class:`DeepLayers`."""
    single = two_layers()
    return Classification(single.network, [single, Classification(DoubleNetwork(lambda: DeepLayers(**options)))])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_clients_of_several_architectures_share_a_head(mode: str) -> None:
    pair, sizes = two_architectures(), (*SIZES, *SIZES)
    toy = toy_of(FedGH(), task=pair, dataset=random_clients(sizes), mode=mode)
    FedGH().check(pair, toy.context)
    before = copy(toy.server["shared"])
    everyone = list(range(len(sizes)))
    toy.step(everyone)
    deep = [client for client, state in toy.states().items() if "first.weight" in state["personal"]]
    assert 0 < len(deep) < len(sizes)
    for client, state in toy.states().items():
        layers = ("first", "second") if client in deep else ("inner",)
        assert set(state["personal"]) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    moved = toy.step(everyone)["shared"]
    assert set(moved) == {"head.weight", "head.bias"}
    assert not torch.equal(moved["head.weight"], before["head.weight"])
    rows = toy.scores()
    assert all(set(found) == {"personalized"} for found in rows.values())


def test_a_client_trains_its_architecture_from_the_common_head() -> None:
    pair, sizes = two_architectures(), (*SIZES, *SIZES)
    idle = TRAIN.model_copy(update={"local_epochs": 0, "batch_size": None})
    toy = toy_of(FedGH(server_lr=0.7), idle, task=pair, dataset=random_clients(sizes))
    seed = toy.context.streams.integer("init.global")
    toy.step(range(len(sizes)))
    head, scores = toy.server["shared"], toy.scores()
    for client, state in toy.states().items():
        deep = "first.weight" in state["personal"]
        task = pair.candidates[int(deep)]
        model = task.network.initialize(seed)
        names = {f"head.{kind}": f"{'top' if deep else 'head'}.{kind}" for kind in ("weight", "bias")}
        model |= {own: head[name] for name, own in names.items()}
        examples = toy.dataset.load(client)["test"]
        expected = F.cross_entropy(task.network.logits(model, examples.x), examples.y)
        assert abs(scores[client]["personalized"].loss - float(expected)) < 1e-6


@pytest.mark.parametrize("options", [{"inputs": 9}, {"bias": False}])
def test_heads_of_unlike_shapes_are_refused(options: dict[str, Any]) -> None:
    pair = two_architectures(**options)
    with pytest.raises(ConfigError, match=r"model\.candidates differ"):
        FedGH().check(pair, toy_of(FedGH()).context)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedGH(), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


class FixedBias(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3)
        self.head.bias.requires_grad_(False)


def test_a_fixed_bias_of_the_head_is_refused() -> None:
    task = Classification(Network(FixedBias))
    with pytest.raises(ConfigError, match=r"'head\.bias' has requires_grad=False"):
        FedGH().check(task, toy_of(FedGH()).context)
    FedGH().check(two_layers(), toy_of(FedGH()).context)


@pytest.mark.slow
def test_clients_whose_inputs_differ_learn_more_than_with_a_shared_body() -> None:
    train = TrainConfig(rounds=30, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
    found = {}
    for algorithm in (FedGH(), FedPer()):
        toy = Toy(algorithm, planted_clients("body"), two_layers(12, 8), train)
        toy.run()
        found[algorithm.name] = held_out_accuracy(toy, "personalized")
    assert found["fedgh"] > found["fedper"] + 0.03
