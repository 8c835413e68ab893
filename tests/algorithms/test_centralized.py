"""Centralized training: invariants CEN, both budgets, fine-tuning, and its independence of the partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.centralized import Centralized
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01
)


def toy(algorithm: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm or Centralized(), random_clients(SIZES), two_layers(), train, **options)


def alone(algorithm: Any, train: TrainConfig, make: Any = two_layers) -> Toy:
    """A single client; the owner of all samples draws from the same streams as that client."""
    streams = RelabelledStreams(0, (0, 0))
    return Toy(algorithm, random_clients((23,)), make(), train, streams=streams)


def tuned(run: Toy) -> dict[int, Tree]:
    """The fine-tuned models of all clients after the last round."""
    assert isinstance(run.algorithm, Centralized)
    run.federation.begin_round(run.round - 1)
    everyone = range(run.dataset.num_clients)
    return run.federation.map(run.algorithm.finetune, everyone, {"model": run.server["model"]})


@pytest.mark.parametrize("budget", ["epochs", "steps"])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_cen_1_one_client_is_local_training_in_all_rounds(budget: Any, make: Any) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": "all"})
    pooled, local = alone(Centralized(budget=budget), train, make), alone(Local(schedule="all"), train, make)
    for _ in range(train.rounds):
        pooled.step()
        local.step()
        assert_equal(pooled.server["model"], local.states()[0]["local"])
        assert_equal(pooled.states()[1]["optimizer"], local.states()[0]["optimizer"])


def test_one_client_without_momentum_is_federated_averaging() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.0, "clients_per_round": 1})
    pooled, federated = (alone(algorithm, train) for algorithm in (Centralized(), FedAvg()))
    for _ in range(train.rounds):
        assert_equal(pooled.step(), federated.step())


def test_inv_cen_2_mean_accuracy_weighted_by_test_sizes_is_pooled_accuracy() -> None:
    run = toy()
    run.run()
    parts = [run.dataset.load(client)["test"] for client in range(4)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    correct = int((run.task.network.logits(run.server["model"], x).argmax(1) == y).sum())
    rows = [rows["global"] for rows in run.scores().values()]
    mean = np.average([row.top1 for row in rows], weights=SIZES)
    assert abs(mean - correct / len(y)) < 1e-12
    assert 0 < correct < len(y)


@pytest.mark.parametrize(("budget", "steps"), [("epochs", 2 * 10), ("steps", 2 * 3)])
def test_it_is_one_run_of_sgd_on_everybodys_samples(budget: Any, steps: int) -> None:
    """37 samples are 10 batches of 4; a client has 9.25 samples on average, which are 3 batches."""
    run = toy(Centralized(budget=budget))
    parts = [run.dataset.load(client)["train"] for client in range(4)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    parameters = {name: leaf.clone().requires_grad_() for name, leaf in run.server["model"].items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for round in range(TRAIN.rounds):
        plan = plan_batches(37, 4, steps, run.context.streams.generator("batches", round, 4))
        assert plan.steps == steps
        for index in plan.batches(CPU):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(run.task.network.logits(parameters, x[index]), y[index]).backward()
            optimizer.step()
        run.step()
        assert_close(run.server["model"], {name: leaf.detach() for name, leaf in parameters.items()}, 1e-12)


def test_a_budget_of_steps_rounds_the_mean_number_of_samples_up() -> None:
    """37 samples of 4 clients are 9.25 a client: 10 samples are 4 batches of 3 an epoch, and 9 would be 3."""
    train = TRAIN.model_copy(update={"batch_size": 3})
    found = toy(Centralized(budget="steps"), train).step()
    same, fewer = (
        toy(Centralized(budget="steps"), train.model_copy(update={"max_local_steps": most})).step() for most in (8, 7)
    )
    assert_equal(found, same)
    assert not torch.equal(found["model"]["inner.weight"], fewer["model"]["inner.weight"])


def test_steps_follow_the_least_number_of_local_steps_and_the_epochs() -> None:
    for train, steps in (({"min_local_steps": 8}, 8), ({"local_epochs": 0, "min_local_steps": 8}, 0)):
        run = toy(Centralized(budget="steps"), TRAIN.model_copy(update={**train, "momentum": 0.0, "batch_size": None}))
        longer = toy(
            Centralized(), TRAIN.model_copy(update={"local_epochs": steps, "momentum": 0.0, "batch_size": None})
        )
        assert_equal(run.step(), longer.step())


def test_passes_over_everybodys_samples_are_not_limited_as_those_of_a_client_are() -> None:
    limited = TRAIN.model_copy(update={"max_local_steps": 1})
    assert_equal(toy(Centralized(), limited).step(), toy(Centralized()).step())
    steps, longer = (toy(Centralized(budget="steps"), train).step() for train in (limited, TRAIN))
    assert not torch.equal(steps["model"]["inner.weight"], longer["model"]["inner.weight"])


def test_who_is_sampled_does_not_matter_and_only_the_owner_has_a_state() -> None:
    first, second = toy(), toy(hosts=3)
    for cohort in ([0], [1, 2], [3]):
        assert_equal(first.step(cohort), second.step([0, 3]))
        assert first.federation.trained_scores == {}
    assert set(first.states()) == {4}
    assert set(first.states()[4]) == {"optimizer"}
    assert_equal(first.states(), second.states())


def test_traffic_is_one_model_down_and_one_up() -> None:
    run = toy()
    run.step()
    size = 8 * run.task.network.num_parameters
    assert (run.federation.traffic.down, run.federation.traffic.up) == (size, size)


def test_finetuning_is_that_of_federated_averaging() -> None:
    run = toy(Centralized(finetune_epochs=2))
    run.run()
    plain = toy()
    assert_equal(run.server, plain.run())
    federated = toy(FedAvg(finetune_epochs=2))
    federated.round, federated.server = run.round, run.server
    federated.federation.begin_round(run.round - 1)
    expected = federated.federation.map(federated.algorithm.finetune, range(4), {"model": run.server["model"]})  # type: ignore[attr-defined]
    assert_equal(tuned(run), expected)
    assert all(set(rows) == {"global", "finetuned"} for rows in run.scores(final=True).values())
    assert all(set(rows) == {"global"} for rows in run.scores().values())


def test_results_do_not_depend_on_the_partition() -> None:
    """Sorted by label or dealt out evenly: one problem, whose samples come in another order."""
    (x, y), *_ = [(part["train"].x, part["train"].y) for part in [random_clients((240,)).load(0)]]
    train = TrainConfig(rounds=10, clients_per_round=2, local_epochs=2, batch_size=10, lr=0.1, momentum=0.5)
    orders = {"sorted": y.argsort(stable=True), "even": torch.arange(240)}
    accuracy, federated = {}, {}
    for name, order in orders.items():
        clients = [(x[part], y[part]) for part in order.chunk(6)]
        for algorithm, found in ((Centralized(), accuracy), (FedAvg(), federated)):
            run = Toy(algorithm, ListDataset(clients), two_layers(), train)
            run.run()
            found[name] = float(np.mean([rows["global"].top1 for rows in run.scores().values()]))
    assert accuracy["even"] > 0.95
    assert abs(accuracy["sorted"] - accuracy["even"]) <= 0.01
    # clients of one class each are what federated averaging suffers from
    assert federated["sorted"] < accuracy["sorted"] - 0.05


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy(Centralized(finetune_epochs=2), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(tuned(looped), tuned(stacked))
