"""FedFusion: invariants FU, the operators on maps and flat features, the server's smoothing, and learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.fedfusion import FedFusion, fused
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import ClassificationModel
from rayfl.params import Tree, copy, interpolate, tensors
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.planted import one_rule, validation_loss
from tests.support.toy_networks import DoubleNetwork, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (20, 13, 10, 19)  # no batch of one sample, which has no batch statistics
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
GATED = pytest.mark.parametrize("operator", ["single", "multi"])


class Maps(ClassificationModel):
    """Two channels of two positions each, and a classifier of two layers with dropout."""

    feature_channels: int | None = 2

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 4)
        self.fc = nn.Linear(4, 6)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x[:, None])).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.drop(features))))  # type: ignore[no-any-return]


class Unsaid(Maps):
    """The same, without a word on the layout of its features."""

    feature_channels = None


def maps(dropout: float = 0.0) -> Classification:
    return Classification(DoubleNetwork(lambda: Maps(dropout)))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0, -2.5])
@pytest.mark.parametrize("task", [two_layers(), maps()], ids=["flat", "maps"])
def test_inv_fu_1_equal_features_are_what_a_gate_makes_of_them(task: Classification, gate: float) -> None:
    model, batch = task.network.initialize(0), some_batch()
    features, logits = task.features_and_logits(model, batch)
    channels = task.network.feature_channels or features.shape[1]
    for value in (torch.tensor(gate, dtype=torch.float64), gate + draw(channels)):
        assert torch.equal(fused(features, features, {"gate": value}, task), features)
        tree = {"model": model, "fusion": {"gate": value}}
        loss = FedFusion(operator="multi").objective(tree, batch, task, {"received": model}, None)
        assert torch.equal(loss, task.cross_entropy(logits, batch))


@MODES
@GATED
@pytest.mark.parametrize("make", [two_layers, lambda: maps(0.3), lambda: normalized_layers(0.3)])
def test_inv_fu_2_a_gate_held_at_zero_is_fedavg(make: Any, operator: Any, mode: str) -> None:
    held, plain = (
        toy_of(algorithm, task=make(), mode=mode) for algorithm in (FedFusion(operator=operator, fusion_lr=0), FedAvg())
    )
    for _ in range(TRAIN.rounds):
        assert_equal(held.step()["model"], plain.step()["model"])
        assert not held.server["fusion"]["gate"].any()


def test_inv_fu_3_the_convolution_can_take_the_mean() -> None:
    for task, channels in ((two_layers(), 7), (maps(), 2)):
        batch, half = some_batch(), torch.eye(channels, dtype=torch.float64) / 2
        fusion = {"weight": torch.cat([half, half], dim=1), "bias": torch.zeros(channels, dtype=torch.float64)}
        model, received = task.network.initialize(1), task.network.initialize(2)
        own, other = (task.features(tree, batch, training=False) for tree in (model, received))
        assert_close(fused(own, other, fusion, task), (own + other) / 2, 1e-15)
    run = toy_of(FedFusion(fusion_lr=0))
    run.server["fusion"] = {
        "weight": torch.eye(7, dtype=torch.float64).repeat(1, 2) / 2,
        "bias": torch.zeros(7, dtype=torch.float64),
    }
    frozen = copy(run.server["fusion"])
    assert_equal(run.run()["fusion"], frozen)


@pytest.mark.parametrize("operator", ["conv", "multi", "single"])
def test_inv_fu_4_the_received_extractor_stays_as_it_is(operator: Any) -> None:
    seen: list[Tree] = []

    class Watched(FedFusion):
        def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
            assert not any(leaf.requires_grad for leaf in frozen["received"].values())
            seen.append(copy(frozen["received"]))
            return super().objective(model, batch, task, frozen, draw)

    run = toy_of(Watched(operator=operator), task=normalized_layers(0.3))
    broadcast = copy(run.server["model"])
    run.step([1])
    assert len(seen) == 2 * 2
    for received in seen:
        assert_equal(received, broadcast)
    assert not torch.equal(run.server["model"]["inner.weight"], broadcast["inner.weight"])


def test_operators_on_maps_are_alike_at_every_position() -> None:
    task, own, other = maps(), draw(6, 4), draw(6, 4, seed=1)
    u, v = own.view(6, 2, 2), other.view(6, 2, 2)
    gate = draw(2, seed=2)
    expected = (1 - gate[:, None]) * u + gate[:, None] * v
    assert_close(fused(own, other, {"gate": gate}, task), expected.flatten(1), 1e-15)
    assert_close(fused(own, other, {"gate": gate[0]}, task), (1 - gate[0]) * own + gate[0] * other, 1e-15)
    fusion = {"weight": draw(2, 4, seed=3), "bias": draw(2, seed=4)}
    convolved = F.conv1d(torch.cat([u, v], dim=1), fusion["weight"][:, :, None], fusion["bias"])
    assert_close(fused(own, other, fusion, task), convolved.flatten(1), 1e-14)


def test_the_convolution_of_flat_features_is_a_linear_layer() -> None:
    own, other = draw(6, 7), draw(6, 7, seed=1)
    fusion = {"weight": draw(7, 14, seed=3), "bias": draw(7, seed=4)}
    expected = F.linear(torch.cat([own, other], dim=1), fusion["weight"], fusion["bias"])
    assert_close(fused(own, other, fusion, two_layers()), expected, 1e-14)


def test_initial_fusion_modules() -> None:
    for operator, task, shape in (("single", maps(), ()), ("multi", maps(), (2,)), ("multi", two_layers(), (7,))):
        gate = toy_of(FedFusion(operator=operator), task=task).server["fusion"]["gate"]  # type: ignore[arg-type]
        assert gate.shape == shape and not gate.any()
    for make, channels in ((maps, 2), (lambda: two_layers(hidden=50), 50)):
        first, same, other = (toy_of(FedFusion(), task=make(), seed=seed).server["fusion"] for seed in (0, 0, 1))
        assert first["weight"].shape == (channels, 2 * channels) and first["bias"].shape == (channels,)
        assert_equal(first, same)
        assert not torch.equal(first["weight"], other["weight"])
        bound = 1 / math.sqrt(2 * channels)
        assert all(leaf.abs().max() <= bound for leaf in tensors(first))
    assert first["weight"].std() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_a_model_that_does_not_tell_its_channels() -> None:
    unsaid = toy_of(FedFusion(operator="single"), task=Classification(DoubleNetwork(Unsaid)))
    FedFusion(operator="single").check(unsaid.task, unsaid.context)
    for operator in ("conv", "multi"):
        with pytest.raises(ConfigError, match=r"feature_channels.*algorithm\.operator=single"):
            FedFusion(operator=operator).check(unsaid.task, unsaid.context)  # type: ignore[arg-type]
        for fitting in (maps(), two_layers()):
            FedFusion(operator=operator).check(fitting, unsaid.context)  # type: ignore[arg-type]


@GATED
def test_the_server_smooths_the_gate_and_nothing_else(operator: Any) -> None:
    smoothed, plain = (
        toy_of(FedFusion(operator=operator, smoothing=s), task=maps()) for s in (FedFusion().smoothing, 0.0)
    )
    start = {"gate": torch.full_like(plain.server["fusion"]["gate"], 0.2)}
    for run in (smoothed, plain):
        run.server["fusion"] = start
        run.step([0, 1])
    assert_equal(smoothed.server["model"], plain.server["model"])
    trained = plain.server["fusion"]
    assert not torch.equal(trained["gate"], start["gate"])
    assert_close(smoothed.server["fusion"], interpolate(trained, start, 0.9), 1e-15)


@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0, "weight_decay": 0.0}])
@pytest.mark.parametrize("operator", ["conv", "multi", "single"])
def test_without_training_model_and_fusion_module_stay(operator: Any, idle: dict[str, Any]) -> None:
    run = toy_of(FedFusion(operator=operator), TRAIN.model_copy(update=idle))
    before = copy(run.server)
    assert_equal(run.run(), before)


def test_the_convolution_is_averaged_without_smoothing() -> None:
    sharp, smooth = (toy_of(FedFusion(smoothing=s)).run() for s in (0.0, 0.9))
    assert_equal(sharp, smooth)


def test_fusion_modules_are_averaged_by_samples_with_the_rest_under_population() -> None:
    replies = [copy(toy_of(FedFusion()).step([client])) for client in range(4)]
    old = toy_of(FedFusion()).server
    for policy, shares in (("samples", (20, 13, 0, 0)), ("population", (20, 13, 10, 19))):
        found = toy_of(FedFusion(aggregation=policy)).step([0, 1])  # type: ignore[arg-type]
        parts = [*replies[:2], old, old]
        for key in ("model", "fusion"):
            mean = {
                name: sum(n * part[key][name] for n, part in zip(shares, parts, strict=True)) / sum(shares)
                for name in old[key]
            }
            assert_close(found[key], mean, 1e-12)


@pytest.mark.parametrize("operator", ["conv", "multi", "single"])
@pytest.mark.parametrize("make", [two_layers, maps])
def test_fedfusion_vectorized_agrees_with_looped(make: Any, operator: Any) -> None:
    looped, stacked = (toy_of(FedFusion(operator=operator), task=make(), mode=m) for m in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())


def test_rows() -> None:
    """The server's model fuses its features with themselves, a client's with those it received."""
    run = toy_of(FedFusion(), task=maps())
    run.step([0])
    before = copy(run.server)
    run.step([1])
    after, network, part = run.server, run.task.network, run.dataset.load(1)["test"]

    def loss(received: Tree) -> float:
        features = [network.features(model, part.x) for model in (after["model"], received)]
        logits = network.classify(after["model"], fused(*features, after["fusion"], run.task))
        return float(F.cross_entropy(logits, part.y))

    assert set(run.federation.trained_scores[1]["test"]) == {"local"}
    assert run.federation.trained_scores[1]["test"]["local"].loss == pytest.approx(loss(before["model"]), abs=1e-12)
    rows = run.scores()[1]
    assert set(rows) == {"global"}
    assert rows["global"].loss == pytest.approx(loss(after["model"]), abs=1e-12)
    assert loss(before["model"]) != loss(after["model"])


@pytest.mark.slow
def test_fusion_learns_faster_than_averaging() -> None:
    """The convolution from few samples of each client; the gate when clients of one class take turns."""
    few = TrainConfig(rounds=12, clients_per_round="all", local_epochs=3, batch_size=6, lr=0.1, momentum=0.5)
    turns = TrainConfig(rounds=20, clients_per_round=1, local_epochs=5, batch_size=10, lr=0.1, momentum=0.5)
    for seed in (1, 4):
        for train, data, algorithm in (
            (few, one_rule(clients=8, train=12, seed=seed), FedFusion()),
            (turns, one_rule(clients=6, train=40, seed=seed, skew=True), FedFusion(operator="single", smoothing=0)),
        ):
            plain, fusing = (Toy(a, data, two_layers(hidden=16), train) for a in (FedAvg(), algorithm))
            plain.run()
            fusing.run()
            assert validation_loss(fusing, "global") < validation_loss(plain, "global") - 0.01
