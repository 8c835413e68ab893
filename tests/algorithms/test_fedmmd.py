"""FedMMD: invariants MMD, the objective, and what the constraint is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedmmd import FedMMD
from algorithms.parts.transfer import maximum_mean_discrepancy
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import copy
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.planted import one_rule, validation_loss
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (20, 13, 10, 19)  # no batch of one sample, which has no batch statistics
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


class Counting(Classification):
    """Counts the forward passes of the received model."""

    received = 0

    def features(self, model: Mapping[str, Tensor], batch: Batch, training: bool = True) -> Tensor:
        self.received += not training
        return super().features(model, batch, training)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


@MODES
@pytest.mark.parametrize("make", [two_layers, lambda: normalized_layers(0.3)])
def test_inv_mmd_1_weight_zero_is_fedavg(make: Any, mode: str) -> None:
    constrained, plain = (
        toy_of(algorithm, task=make(), mode=mode) for algorithm in (FedMMD(transfer_weight=0), FedAvg())
    )
    for _ in range(TRAIN.rounds):
        assert_equal(constrained.step(), plain.step())
    assert constrained.states() == {}


def test_inv_mmd_1_weight_zero_does_not_run_the_received_model() -> None:
    for weight, expected in ((0.0, 0), (0.1, 2 * 2 * 2)):  # clients, epochs, batches
        task = Counting(two_layers().network)
        Toy(FedMMD(transfer_weight=weight), random_clients([16] * 2), task, TRAIN).step()
        assert task.received == expected


def test_inv_mmd_1_the_received_model_takes_no_dropout_draws_and_keeps_its_buffers() -> None:
    """A weight so small that only side effects of the second forward pass could show."""
    plain = toy_of(FedAvg(), task=normalized_layers(0.3)).run()
    constrained = toy_of(FedMMD(transfer_weight=1e-300), task=normalized_layers(0.3)).run()
    assert_close(constrained["model"], plain["model"], 1e-100)


@MODES
def test_inv_mmd_2_a_single_step_is_fedavg(mode: str) -> None:
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
    constrained, plain = (toy_of(algorithm, train, mode=mode) for algorithm in (FedMMD(transfer_weight=50.0), FedAvg()))
    for _ in range(train.rounds):
        assert_close(constrained.step(), plain.step(), 1e-12)
    further = train.model_copy(update={"local_epochs": 2})
    constrained, plain = (toy_of(algorithm, further) for algorithm in (FedMMD(transfer_weight=50.0), FedAvg()))
    difference = constrained.step()["model"]["inner.weight"] - plain.step()["model"]["inner.weight"]
    assert difference.abs().max() > 1e-3


def test_inv_mmd_2_no_discrepancy_and_no_pull_at_the_received_model() -> None:
    task, part = two_layers(), random_clients((9,)).load(0)["train"]
    model, batch = task.network.initialize(0), Batch(part.x, part.y)
    moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    value = FedMMD(transfer_weight=1e3).objective(moved, batch, task, {"received": model}, None)
    plain = task.loss(moved, batch)
    assert abs(float((value - plain).detach())) < 1e-12
    found, expected = (torch.autograd.grad(loss, list(moved.values())) for loss in (value, plain))
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


def test_objective_adds_the_discrepancy_of_the_features() -> None:
    task, part = normalized_layers(), random_clients((9,)).load(0)["train"]
    model, received = task.network.initialize(1), task.network.initialize(2)
    batch, frozen = Batch(part.x, part.y), copy(received)
    value = FedMMD(transfer_weight=0.3).objective(copy(model), batch, task, {"received": frozen}, None)
    features, logits = task.features_and_logits(copy(model), batch)
    other = task.features_and_logits(received, batch, training=False)[0]
    expected = task.cross_entropy(logits, batch) + 0.3 * maximum_mean_discrepancy(features, other, batch)
    assert torch.equal(value, expected)
    assert_equal(frozen, received)


def test_fedmmd_vectorized_agrees_with_looped_on_ragged_clients() -> None:
    looped, stacked = (toy_of(FedMMD(transfer_weight=0.7), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run(), 1e-9)


@MODES
def test_mini_batches_of_one_sample_leave_federated_averaging(mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1})
    constrained, plain = (
        Toy(algorithm, random_clients((4, 3)), two_layers(), train, mode=mode)
        for algorithm in (FedMMD(transfer_weight=50.0), FedAvg())
    )
    assert_close(constrained.run(), plain.run(), 1e-12)


@pytest.mark.slow
def test_a_last_mini_batch_of_one_sample_trains_the_same_in_every_mode() -> None:
    """41 samples in mini-batches of 10; the estimate as it is has no bound there, and no two ways of rounding agree."""
    train = TRAIN.model_copy(update={"batch_size": 10, "rounds": 6, "local_epochs": 5, "momentum": 0.9})

    def run(mode: str, one_sample: str) -> Toy:
        method = FedMMD(transfer_weight=0.1, one_sample=one_sample)  # type: ignore[arg-type]
        data = random_clients((41, 41), dtype=torch.float32)
        toy = Toy(method, data, two_layers(double=False), train, mode=mode)
        toy.run()
        return toy

    looped, stacked = run("looped", "skip"), run("vectorized", "skip")
    assert_close(looped.server, stacked.server, 1e-4)
    as_it_is = run("looped", "paper").server["model"]["inner.weight"]
    assert (as_it_is - looped.server["model"]["inner.weight"]).abs().max() > 0.05


def test_fine_tuning_has_no_constraint() -> None:
    tuned, plain = toy_of(FedMMD(finetune_epochs=1)), toy_of(FedAvg(finetune_epochs=1))
    plain.server = copy(tuned.run())
    plain.round = tuned.round
    found, expected = tuned.scores(final=True), plain.scores(final=True)
    for client, rows in found.items():
        assert rows["finetuned"].vector.tolist() == expected[client]["finetuned"].vector.tolist()


@pytest.mark.slow
def test_long_training_on_few_noisy_samples_unlearns_less_the_larger_the_weight() -> None:
    """One client trains long on what everybody learned: its features drift less, and it forgets less of it."""
    train = TrainConfig(rounds=10, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.1, momentum=0.5)
    data = one_rule(clients=8, train=20, seed=2, noise=0.3)
    common = Toy(FedAvg(), data, two_layers(hidden=16), train, mode="vectorized")
    common.run()
    long = train.model_copy(update={"local_epochs": 60})
    x = data.load(0)["validation"].x
    drifts, losses = [], []
    for weight in (0.0, 0.1, 1.0):
        runs = [Toy(FedMMD(transfer_weight=weight), data, common.task, long) for _ in range(4)]
        found = []
        for client, run in enumerate(runs):
            run.server = common.server
            models = run.step([client])["model"], common.server["model"]
            features = [run.task.network.features(model, x) for model in models]
            found.append(float(maximum_mean_discrepancy(*features, Batch(x, x[:, 0]))))
        drifts.append(sum(found) / 4)
        losses.append(sum(validation_loss(run, "global") for run in runs) / 4)
    assert drifts[2] < drifts[1] / 2 < drifts[0] / 3
    assert losses[2] < losses[1] < losses[0] - 0.03
