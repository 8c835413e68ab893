"""Fine-tuning of the final model (FedAvg-LU): invariants LU, the part that moves, and which epoch's model is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients

TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SIZES = (8, 12, 6, 10)


def quad(algorithm: FedAvg, points: list[float], copies: list[int], **train: object) -> Toy:
    """QUAD with full batches, everybody sampled unless told otherwise."""
    settings = {"rounds": 3, "clients_per_round": len(points), "batch_size": None, "lr": 0.1, "local_epochs": 2}
    return Toy(algorithm, quadratic_clients(points, copies), Quadratic(), TrainConfig(**{**settings, **train}))  # type: ignore[arg-type]


def finetuned(toy: Toy, clients: list[int]) -> dict[int, Tree]:
    """v_k of the given clients, as they fine-tune after the last round."""
    assert isinstance(toy.algorithm, FedAvg)
    toy.federation.begin_round(toy.round - 1)
    return toy.federation.map(toy.algorithm.finetune, clients, {"model": toy.server["model"]})


def test_inv_lu_1_no_epochs_of_finetuning_is_the_global_model() -> None:
    toy = Toy(FedAvg(finetune_epochs=0), random_clients(SIZES), two_layers(), TRAIN)
    toy.run()
    for tuned in finetuned(toy, list(range(4))).values():
        assert_equal(tuned, toy.server["model"])
    for rows in toy.scores(final=True).values():
        assert np.array_equal(rows["finetuned"].vector, rows["global"].vector)


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_inv_lu_2_the_global_model_is_that_of_fedavg(epochs: int) -> None:
    plain, tuning = (
        Toy(algorithm, random_clients(SIZES), two_layers(), TRAIN)
        for algorithm in (FedAvg(), FedAvg(finetune_epochs=epochs))
    )
    assert_equal(tuning.run(), plain.run())
    expected, found = plain.scores(final=True), tuning.scores(final=True)
    for client in range(4):
        assert np.array_equal(found[client]["global"].vector, expected[client]["global"].vector)
    # clients that were never sampled fine-tune too, but only after the last round
    assert all("finetuned" in rows for rows in found.values())
    assert all("finetuned" not in rows for rows in tuning.scores(final=False).values())


@pytest.mark.parametrize("size", [4, None])
def test_finetuning_is_a_local_update_on_mini_batches_of_its_own(size: int | None) -> None:
    train = TRAIN.model_copy(update={"batch_size": size})
    tuning, again = (
        Toy(algorithm, random_clients(SIZES), two_layers(), train)
        for algorithm in (FedAvg(finetune_epochs=1), FedAvg())
    )
    tuning.run()
    again.round, again.server = tuning.round - 1, copy(tuning.server)
    found, expected = finetuned(tuning, [0])[0], again.step([0])["model"]
    apart = max(float((found[name] - leaf).abs().max()) for name, leaf in expected.items())
    assert apart < 1e-12 if size is None else apart > 1e-6


def test_inv_lu_3_quadratic_closed_form() -> None:
    points, tau, eta = [0.0, 4.0, 10.0], 3, 0.25
    toy = quad(FedAvg(finetune_epochs=tau, finetune_lr=eta), points, [1, 3, 2], clients_per_round=2)
    final = float(toy.run()["model"]["theta"])
    for client, tuned in finetuned(toy, [0, 1, 2]).items():
        expected = points[client] + (1 - eta) ** tau * (final - points[client])
        assert abs(float(tuned["theta"]) - expected) < 1e-12


def test_lu_learning_rate_defaults_to_that_of_the_last_round() -> None:
    toy = quad(FedAvg(finetune_epochs=1), [0.0, 4.0], [1, 1], rounds=3, lr=0.4, lr_decay=0.5)
    final = float(toy.run()["model"]["theta"])
    assert abs(float(finetuned(toy, [1])[1]["theta"]) - (4 + (1 - 0.1) * (final - 4))) < 1e-12


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_lu_4_finetuning_does_not_depend_on_the_other_clients(make: object) -> None:
    toy = Toy(FedAvg(finetune_epochs=2), random_clients(SIZES), make(), TRAIN, hosts=2)  # type: ignore[operator]
    toy.run()
    together = finetuned(toy, [0, 1, 2, 3])
    for client in range(4):
        assert_equal(finetuned(toy, [client])[client], together[client])


@pytest.mark.parametrize("scope", ["head", "body"])
def test_lu_scope_moves_that_part_only(scope: str) -> None:
    toy = Toy(FedAvg(finetune_epochs=2, finetune_scope=scope), random_clients(SIZES), normalized_layers(), TRAIN)  # type: ignore[arg-type]
    toy.run()
    network = toy.task.network
    moving = set(network.head_names if scope == "head" else network.body_names)
    together = finetuned(toy, [0, 1, 2, 3])
    for client, tuned in together.items():
        assert list(tuned) == list(toy.server["model"])
        for name in network.parameter_names:
            assert torch.equal(tuned[name], toy.server["model"][name]) == (name not in moving), name
        # running statistics of one client must not leak into the next one's model
        assert_equal(finetuned(toy, [client])[client], tuned)


def test_lu_full_scope_is_another_pass_of_local_training() -> None:
    toy = Toy(
        FedAvg(finetune_epochs=2), random_clients((8, 8)), two_layers(), TRAIN.model_copy(update={"batch_size": None})
    )
    toy.run()
    # with full batches the order of the samples moves round-off only, so the next round's update is the same
    again = Toy(FedAvg(), toy.dataset, toy.task, toy.train.model_copy(update={"local_epochs": 2}))
    again.server = copy(toy.server)
    assert_close(finetuned(toy, [0])[0], again.step([0])["model"], 1e-12)


@pytest.mark.parametrize("option", [{"finetune_lr": 0.1}, {"finetune_scope": "head"}, {"finetune_select": "best_val"}])
def test_lu_options_without_epochs_are_refused(option: dict[str, Any]) -> None:
    toy = Toy(FedAvg(), random_clients((4,)), two_layers(), TRAIN)
    with pytest.raises(ConfigError, match=f"{next(iter(option))} without algorithm.finetune_epochs"):
        FedAvg(**option).check(toy.task, toy.context)
    FedAvg(finetune_epochs=1, **option).check(toy.task, toy.context)
    FedAvg(**FedAvg().model_dump()).check(toy.task, toy.context)


def test_vectorized_finetuning_agrees_with_looped() -> None:
    looped, stacked = (
        Toy(FedAvg(finetune_epochs=2, finetune_scope="head"), random_clients(SIZES), two_layers(), TRAIN, mode=mode)
        for mode in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run())
    assert_close(finetuned(looped, [0, 1, 2, 3]), finetuned(stacked, [0, 1, 2, 3]))


def validated(task: Any = None, train: dict[str, Any] | None = None, **options: Any) -> Toy:
    """Clients whose few training samples a long fine-tuning overfits, with validation samples of the same rule."""
    whole = random_clients((60, 60, 60, 60))
    parts = [whole.load(client)["train"] for client in range(4)]
    flipped = [torch.where(torch.arange(12) < 4, (part.y[:12] + 1) % 3, part.y[:12]) for part in parts]
    clients = [(part.x[:12], y) for part, y in zip(parts, flipped, strict=True)]
    dataset = ListDataset(clients, validation=[(part.x[12:], part.y[12:]) for part in parts])
    section = TRAIN.model_copy(update={"lr": 0.3, **(train or {})})
    toy = Toy(FedAvg(finetune_select="best_val", **options), dataset, task or two_layers(), section)
    toy.run()
    return toy


def with_algorithm(toy: Toy, **changes: Any) -> Toy:
    """The same server after the same rounds, under other options."""
    other = Toy(toy.algorithm.model_copy(update=changes), toy.dataset, toy.task, toy.train)
    other.round, other.server = toy.round, toy.server
    return other


def validation_loss(toy: Toy, client: int, model: Tree) -> float:
    part = toy.dataset.load(client)["validation"]
    loss: Tensor = toy.task.loss(model, Batch(part.x, part.y))
    return float(loss)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.first_case
def test_best_val_is_the_epoch_with_the_lowest_validation_loss(momentum: float) -> None:
    epochs = 12
    toy = validated(finetune_epochs=epochs, train={"momentum": momentum})
    lasts = [with_algorithm(toy, finetune_select="last", finetune_epochs=epoch + 1) for epoch in range(epochs)]
    path = [finetuned(last, [0, 1, 2, 3]) for last in lasts]
    kept = []
    for client, tuned in finetuned(toy, [0, 1, 2, 3]).items():
        losses = [validation_loss(toy, client, models[client]) for models in path]
        kept.append(losses.index(min(losses)))
        assert_equal(tuned, path[kept[-1]][client])
    assert any(epoch < epochs - 1 for epoch in kept)
    assert len(set(kept)) > 1


def test_best_val_never_keeps_the_model_before_fine_tuning() -> None:
    """Not even where every epoch made it worse: how fine-tuning fares must not be hidden."""
    toy = validated(finetune_epochs=3, finetune_lr=20.0)
    for client, tuned in finetuned(toy, [0, 1, 2, 3]).items():
        assert validation_loss(toy, client, tuned) > validation_loss(toy, client, toy.server["model"])


def test_best_val_of_one_epoch_is_the_last() -> None:
    toy = validated(finetune_epochs=1)
    assert_equal(finetuned(toy, [0, 1, 2, 3]), finetuned(with_algorithm(toy, finetune_select="last"), [0, 1, 2, 3]))


def test_best_val_without_epochs_is_the_global_model() -> None:
    toy = validated(finetune_epochs=0)
    for tuned in finetuned(toy, [0, 1, 2, 3]).values():
        assert_equal(tuned, toy.server["model"])


def test_best_val_without_validation_samples_is_the_last() -> None:
    toy = Toy(FedAvg(finetune_epochs=3, finetune_select="best_val"), random_clients(SIZES), two_layers(), TRAIN)
    toy.run()
    assert_equal(finetuned(toy, [0, 1, 2, 3]), finetuned(with_algorithm(toy, finetune_select="last"), [0, 1, 2, 3]))


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_f5_fine_tuning_starts_with_empty_momentum_and_leaves_none(make: Any) -> None:
    """Also where local training keeps its momentum; and twice the same."""
    toy = validated(finetune_epochs=4, task=make(), train={"persist_optimizer": True})
    states = toy.states()
    assert states
    first, second = (toy.scores(final=True) for _ in range(2))
    assert_equal(toy.states(), states)
    forgetting = Toy(toy.algorithm, toy.dataset, toy.task, toy.train.model_copy(update={"persist_optimizer": False}))
    forgetting.round, forgetting.server = toy.round, toy.server
    third = forgetting.scores(final=True)
    for client in range(4):
        for scores in (second, third):
            assert scores[client]["finetuned"].vector.tolist() == first[client]["finetuned"].vector.tolist()
    assert_equal(finetuned(toy, [0, 1, 2, 3]), finetuned(toy, [0, 1, 2, 3]))
    assert_equal(toy.states(), states)


@pytest.mark.parametrize("scope", ["full", "head"])
def test_best_val_vectorized_agrees_with_looped(scope: str) -> None:
    looped = validated(finetune_epochs=6, finetune_scope=scope)
    stacked = Toy(looped.algorithm, looped.dataset, looped.task, looped.train, mode="vectorized")
    stacked.round, stacked.server = looped.round, looped.server
    assert_close(finetuned(looped, [0, 1, 2, 3]), finetuned(stacked, [0, 1, 2, 3]))
