"""Ditto: invariants DIT, its rows of the equivalence matrix, fixture G17, options and learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch
from tests.support.toy_networks import Quadratic, normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


@dataclass(frozen=True)
class SecondPass(RandomStreams):
    """The streams of a round's second pass in place of those of the first."""

    def _digest(self, name: str, round: int, client: int) -> bytes:
        return super()._digest(f"{name}.1" if name in ("batches", "dropout") else name, round, client)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def quad(algorithm: Any, start: float = 1.0, **changes: Any) -> Toy:
    settings = {"rounds": 1, "clients_per_round": 2, "local_epochs": 400, "batch_size": None, "lr": 0.1}
    return Toy(
        algorithm, quadratic_clients([0.0, 4.0], [1, 3]), Quadratic(start=start), TrainConfig(**{**settings, **changes})
    )


def personal(toy: Toy) -> dict[int, Tree]:
    """v_k of the clients sampled so far."""
    return {client: state["personal"] for client, state in toy.states().items()}


def vectors(toy: Toy, row: str, final: bool = False) -> dict[int, list[float]]:
    return {client: rows[row].vector.tolist() for client, rows in toy.scores(final).items()}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("weight", [0.0, 1.0, 20.0])
def test_inv_dit_1_server_is_fedavg(weight: float, aggregation: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"lr": 0.03})
    ditto = toy_of(Ditto(proximal_weight=weight, aggregation=aggregation), train, mode=mode)
    plain = toy_of(FedAvg(aggregation=aggregation), train, mode=mode)
    for _ in range(TRAIN.rounds):
        assert_equal(ditto.step(), plain.step())
    assert vectors(ditto, "global") == vectors(plain, "global")


@pytest.mark.parametrize("changes", [{}, {"persist_optimizer": True}, {"min_local_steps": 7}, {"max_grad_norm": 0.5}])
def test_inv_dit_2_without_proximal_term_it_is_local_training(changes: dict[str, Any]) -> None:
    train = TRAIN.model_copy(update=changes)
    ditto = toy_of(Ditto(proximal_weight=0), train)
    alone = toy_of(Local(), train, streams=SecondPass(0))
    for cohort in ([0, 1], [1, 3], [0, 3], [1, 2]):
        ditto.step(cohort)
        alone.step(cohort)
        assert_equal(personal(ditto), {client: state["local"] for client, state in alone.states().items()})
    assert vectors(ditto, "personalized") == vectors(alone, "personalized")


def test_inv_dit_2_with_dropout_and_running_statistics() -> None:
    dataset, task = random_clients((8, 12, 6, 10)), normalized_layers(0.3)
    ditto = Toy(Ditto(proximal_weight=0), dataset, task, TRAIN)
    alone = Toy(Local(), dataset, task, TRAIN, streams=SecondPass(0))
    for cohort in ([0, 1], [1, 3], [0, 3]):
        ditto.step(cohort)
        alone.step(cohort)
    assert_equal(personal(ditto), {client: state["local"] for client, state in alone.states().items()})


@pytest.mark.parametrize("weight", [0.05, 0.5, 2.0])
@pytest.mark.first_case
def test_inv_dit_3_quadratic_minimiser(weight: float) -> None:
    toy = quad(Ditto(proximal_weight=weight, personal_epochs=400), rounds=3, local_epochs=2)
    for _ in range(3):
        received = float(toy.server["model"]["theta"])
        toy.step([0, 1])
        for client, point in enumerate((0.0, 4.0)):
            expected = (point + weight * received) / (1 + weight)
            assert abs(float(personal(toy)[client]["theta"]) - expected) < 1e-12
        # the anchor is the broadcast model, which by now has moved
        assert abs(float(toy.server["model"]["theta"]) - received) > 1e-2


def test_g17_ditto() -> None:
    toy = quad(Ditto(proximal_weight=0.5))
    toy.step([0, 1])
    for client, expected in ((0, 1 / 3), (1, 3.0)):
        assert abs(float(personal(toy)[client]["theta"]) - expected) < 1e-9


def test_inv_dit_4_without_personal_epochs_the_copy_stays_initial() -> None:
    toy = toy_of(Ditto(personal_epochs=0))
    start = copy(toy.server["model"])
    toy.run()
    assert_equal(personal(toy), dict.fromkeys(personal(toy), start))
    untrained = toy_of(Ditto())
    assert vectors(toy, "personalized") == vectors(untrained, "global")
    assert vectors(toy, "personalized") != vectors(toy, "global")


def test_personal_epochs_are_those_of_the_second_pass_alone() -> None:
    """One full-batch step at the received model feels no pull; two do."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
    for epochs, same in ((None, True), (1, True), (2, False)):
        pulled, free = (toy_of(Ditto(proximal_weight=w, personal_epochs=epochs), train) for w in (5.0, 0.0))
        assert_equal(pulled.step([0]), free.step([0]))
        apart = personal(pulled)[0]["head.weight"] - personal(free)[0]["head.weight"]
        assert (apart.abs().max() < 1e-12) == same


def test_copy_goes_on_from_where_it_was() -> None:
    toy = quad(Ditto(proximal_weight=0.5), rounds=2, local_epochs=1)
    received, own = 1.0, 1.0
    for _ in range(2):
        received = float(toy.server["model"]["theta"])
        own -= 0.1 * (own - 4.0 + 0.5 * (own - received))
        toy.step([1])
        assert abs(float(personal(toy)[1]["theta"]) - own) < 1e-12


@pytest.mark.parametrize(("unseen", "others"), [("init", "before"), ("global", "global")])
def test_unseen_clients(unseen: Any, others: str) -> None:
    toy = toy_of(Ditto(unseen=unseen))
    before = vectors(toy, "global")
    assert vectors(toy, "personalized") == before
    toy.step([0, 2])
    now = vectors(toy, "global")
    expected = before if others == "before" else now
    found = vectors(toy, "personalized")
    for client in (1, 3):
        assert found[client] == expected[client]
    for client in (0, 2):
        assert found[client] not in (before[client], now[client])


def test_form_of_the_official_superfed_code_pulls_with_constant_length() -> None:
    task = two_layers()
    received, model = task.network.initialize(0), task.network.initialize(1)
    part = random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    gradients = []
    for weight in (0.0, 3.0):
        algorithm = Ditto(proximal_weight=weight, proximal_form="norm_per_layer")
        moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
        loss = algorithm.personal_objective(moved, batch, task, {"received": received}, None)
        gradients.append(torch.autograd.grad(loss, list(moved.values())))
    for name, without, with_pull in zip(model, *gradients, strict=True):
        assert abs(float((with_pull - without).norm()) - (3.0 if name.endswith("weight") else 0.0)) < 1e-12


def test_running_statistics_are_not_penalised() -> None:
    task = normalized_layers()
    model = task.network.initialize(0)
    part = random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    elsewhere = {name: leaf + 10 if name in task.network.buffer_names else leaf for name, leaf in model.items()}
    loss = Ditto().personal_objective(copy(model), batch, task, {"received": elsewhere}, None)
    assert len(task.network.buffer_names) == 2
    assert torch.equal(loss, task.loss(copy(model), batch))


def test_published_rows_are_both_trained_models() -> None:
    toy = toy_of(Ditto())
    toy.step([2])
    rows = toy.federation.trained_scores[2]["test"]
    assert set(rows) == {"local", "personalized"}
    # after a round of one client the server holds what that client trained
    assert rows["local"].vector.tolist() == vectors(toy, "global")[2]
    assert rows["personalized"].vector.tolist() == vectors(toy, "personalized")[2]


@pytest.mark.parametrize("form", ["half_squared", "norm_per_layer"])
def test_vectorized_agrees_with_looped_and_others_keep_their_copies(form: Any) -> None:
    algorithm = Ditto(proximal_weight=0.5, proximal_form=form, personal_epochs=3)
    looped, stacked = (toy_of(algorithm, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2], [1, 3], [0, 1, 2, 3], [2]):
        before = personal(looped)
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
        for client in set(before) - set(cohort):
            assert_equal(personal(looped)[client], before[client])


def accuracies(seed: int) -> dict[str, float]:
    """Of the global, local and personal models on fresh samples of clients that share most of a rule."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    few, fresh = [], []
    for _ in range(8):
        rule = common + 0.8 * torch.randn(10, 2, generator=generator, dtype=torch.float64)
        for kept, n in ((few, 12), (fresh, 400)):
            x = torch.randn(n, 10, generator=generator, dtype=torch.float64)
            kept.append((x, (x @ rule).argmax(1)))
    train = TrainConfig(rounds=25, clients_per_round="all", local_epochs=3, batch_size=6, lr=0.3)
    ditto, alone = (
        Toy(algorithm, ListDataset(few, classes=2), softmax_regression(10, 2), train)
        for algorithm in (Ditto(proximal_weight=0.1), Local())
    )
    model, own = ditto.run()["model"], personal(ditto)
    alone.run()
    found: dict[str, list[float]] = {"global": [], "local": [], "personal": []}
    for k, (x, y) in enumerate(fresh):
        for row, tree in (("global", model), ("local", alone.states()[k]["local"]), ("personal", own[k])):
            found[row].append(float((ditto.task.network.logits(tree, x).argmax(1) == y).double().mean()))
    return {row: float(np.mean(values)) for row, values in found.items()}


@pytest.mark.slow
def test_personal_models_beat_the_global_and_the_local_ones() -> None:
    found = accuracies(0)
    assert found["personal"] > max(found["global"], found["local"]) + 0.02
