"""FedDBE: invariants DBE of the bias vector, the pull of mean features, and the start over all clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.feddbe import FedDBE
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, leaves
from rayfl.tasks.base import Batch
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    camps,
    held_out_accuracy,
    initial,
    partly_fixed,
    three_layers,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

PLAIN = {"mean_weight": 0.0, "vector_lr": 0.0}


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_dbe_1_without_pull_and_vector_it_is_fedavg(make: Any) -> None:
    both = toy_of(FedDBE(**PLAIN), task=make()), toy_of(FedAvg(), task=make())
    for cohort in COHORTS:
        assert_equal(both[0].step(cohort), both[1].step(cohort))
    scores, expected = both[0].scores(), both[1].scores()
    assert vectors(scores, "global") == vectors(expected, "global") == vectors(scores, "personalized")


def gradients(algorithm: FedDBE, trained: Tree, batch: Batch, frozen: Any) -> Tree:
    """The gradient of the objective by path."""
    moved = {path: leaf.clone().requires_grad_() for path, leaf in leaves(trained)}
    model = {path.removeprefix("model/"): leaf for path, leaf in moved.items() if path.startswith("model/")}
    tree = {"model": model, **{path: leaf for path, leaf in moved.items() if "/" not in path}}
    value = algorithm.objective(tree, batch, two_layers(), frozen)
    return dict(zip(moved, torch.autograd.grad(value, list(moved.values()), materialize_grads=True), strict=True))


def example() -> tuple[Tree, Batch, Tensor]:
    """A model with a vector, a mini-batch, and a mean to be pulled to."""
    part = random_clients([9], seed=4).load(0)["train"]
    generator = torch.Generator().manual_seed(0)
    vector, mean = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return {"model": two_layers().network.initialize(0), "vector": vector}, Batch(part.x, part.y), mean


def test_inv_dbe_2_the_vector_moves_the_effective_bias() -> None:
    trained, batch, _ = example()
    found = gradients(FedDBE(), trained, batch, None)
    weight = trained["model"]["head.weight"]
    assert_close(found["vector"], weight.T @ found["model/head.bias"], 1e-12)
    inputs = two_layers().network.head_inputs_and_logits(trained["model"], batch.x)[0]
    logits = (inputs + trained["vector"]) @ weight.T + trained["model"]["head.bias"]
    value = FedDBE().objective(trained, batch, two_layers(), None)
    assert_close(value, F.cross_entropy(logits, batch.y), 1e-12)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_inv_dbe_3_the_pull_moves_the_body_alone(momentum: float) -> None:
    trained, batch, mean = example()
    if momentum < 1:
        trained["running"] = torch.ones(7, dtype=torch.float64)
    without, pulled = (
        gradients(FedDBE(mean_weight=weight, mean_momentum=momentum), trained, batch, {"mean": mean})
        for weight in (0.0, 9.0)
    )
    for path in ("vector", "model/head.weight", "model/head.bias"):
        assert torch.equal(pulled[path], without[path])
    assert (pulled["model/inner.weight"] - without["model/inner.weight"]).abs().max() > 1e-3
    inputs = two_layers().network.head_inputs_and_logits(trained["model"], batch.x)[0]
    running = momentum * inputs.mean(0) + (1 - momentum)
    # kappa/d 1/2 ||r - zbar||^2, and what keeps the running mean
    values = [
        FedDBE(mean_weight=weight, mean_momentum=momentum).objective(trained, batch, two_layers(), {"mean": mean})
        for weight in (0.0, 9.0)
    ]
    assert_close(values[1] - values[0], 9.0 * (running - mean).square().mean() / 2, 1e-12)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_inv_dbe_4_steps_are_those_with_a_running_mean_by_hand(momentum: float) -> None:
    """With beta = 1 the pull reads the current mini-batch alone, with less also those before it in this update."""
    toy = toy_of(FedDBE(mean_weight=7.0, mean_momentum=momentum, vector_lr=0.05), task=two_layers())
    model, vector = initial(toy), torch.zeros(7, dtype=torch.float64)
    part = toy.dataset.load(1)["train"]
    for round in range(2):
        toy.step([1])
        target = toy.server["mean"]
        moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
        own = vector.clone().requires_grad_()
        groups = [{"params": list(moved.values())}, {"params": [own], "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=TRAIN.momentum, weight_decay=TRAIN.weight_decay)
        running = torch.zeros(7, dtype=torch.float64)
        plan = plan_batches(12, 4, 6, toy.context.streams.generator("batches", round, 1))
        for index in plan.batches(CPU):
            inputs, _ = toy.task.network.head_inputs_and_logits(moved, part.x[index])
            running = (1 - momentum) * running.detach() + momentum * inputs.mean(0)
            logits = (inputs + own) @ moved["head.weight"].T + moved["head.bias"]
            value = F.cross_entropy(logits, part.y[index]) + 7.0 * 0.5 * F.mse_loss(running, target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        model, vector = {name: leaf.detach() for name, leaf in moved.items()}, own.detach()
        assert_close(toy.server["model"], model, 1e-12)
        assert_close(toy.states()[1]["vector"], vector, 1e-12)


def test_inv_dbe_5_the_common_mean_stays() -> None:
    toy = toy_of(FedDBE())
    means = [copy(toy.step(cohort))["mean"] for cohort in COHORTS]
    for mean in means[1:]:
        assert torch.equal(mean, means[0])
    assert means[0].abs().max() > 0.01


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_dbe_6_the_start_changes_nothing_but_the_common_mean(make: Any) -> None:
    train = TRAIN.model_copy(update={"persist_optimizer": True})
    plain, started = (toy_of(FedDBE(mean_weight=0), train, make()) for _ in range(2))
    for round, cohort in enumerate(COHORTS):
        plain.step(cohort)
        if round == 0:
            before = copy(started.server)
            mean = started.federation.mean(started.algorithm.statistics, range(4), before)  # type: ignore[attr-defined]
            assert_equal(started.server, before)
            assert not started.states()
            assert mean["mean"].shape == (started.task.network.head_shape[1],)
        started.step(cohort)
        assert_equal(started.server, plain.server)
        assert_equal(started.states(), plain.states())


@pytest.mark.parametrize("options", [{}, {"start_mean": "all"}, {"start_epochs": 0}, {"mean_momentum": 0.2}], ids=str)
def test_inv_dbe_7_equal_clients_have_the_common_mean(options: dict[str, Any]) -> None:
    part, equal = random_clients([8]).load(0)["train"], RelabelledStreams(0, (0,) * 3)
    one = (part.x, part.y)
    toys = [Toy(FedDBE(**options), ListDataset([one] * k), two_layers(), TRAIN, streams=equal) for k in (1, 3)]
    for toy in toys:
        toy.step([0])
    assert_equal(toys[0].server["mean"], toys[1].server["mean"])


def test_inv_dbe_8_vectors_stay_with_clients_that_were_sampled() -> None:
    toy = toy_of(FedDBE(), task=two_layers())
    size = toy.task.network.num_parameters
    toy.step([0])
    opening, message = 8 * size, 8 * (size + 7)
    assert toy.federation.traffic.by_client[0] == (opening + message, 8 * (7 + size))
    assert toy.federation.traffic.by_client[3] == (opening, 8 * 7)
    before = copy(toy.states())
    toy.step([1])
    assert toy.federation.traffic.by_client == {1: (message, 8 * size)}
    assert_equal(toy.states()[0], before[0])
    assert set(toy.states()) == {0, 1} and set(toy.states()[1]) == {"vector"}


@pytest.mark.parametrize("start_mean", ["running", "all"])
@pytest.mark.parametrize("epochs", [None, 0, 3])
def test_the_common_mean_is_that_of_copies_of_the_initial_model(start_mean: Any, epochs: int | None) -> None:
    algorithm = FedDBE(start_mean=start_mean, start_epochs=epochs, mean_momentum=0.5)
    toy = toy_of(algorithm, task=two_layers())
    total = torch.zeros(7, dtype=torch.float64)
    for client in range(4):
        part = toy.dataset.load(client)["train"]
        moved = {name: leaf.clone().requires_grad_() for name, leaf in initial(toy).items()}
        optimizer = torch.optim.SGD(moved.values(), lr=0.1, momentum=TRAIN.momentum, weight_decay=TRAIN.weight_decay)
        generator = toy.context.streams.generator("batches.statistics", 0, client)
        steps = (2 if epochs is None else epochs) * -(-len(part) // 4)
        running = torch.zeros(7, dtype=torch.float64)
        for index in plan_batches(len(part), 4, steps, generator).batches(CPU):
            inputs, logits = toy.task.network.head_inputs_and_logits(moved, part.x[index])
            running = (running + inputs.detach().mean(0)) / 2
            optimizer.zero_grad()
            F.cross_entropy(logits, part.y[index]).backward()
            optimizer.step()
        if start_mean == "all" or epochs == 0:
            running = toy.task.network.head_inputs_and_logits(moved, part.x)[0].detach().mean(0)
        total += len(part) * running / 36
    toy.step([2])
    assert_close(toy.server["mean"], total, 1e-12)


def test_clipped_gradients_are_refused_where_steps_keep_means() -> None:
    toy = toy_of(FedDBE(), TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    for wrong, message in (
        (FedDBE(), r"algorithm\.start_mean=running"),
        (FedDBE(mean_momentum=0.1, start_mean="all"), r"algorithm\.mean_momentum below 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong.check(toy.task, toy.context)
    for right in (FedDBE(mean_weight=0, mean_momentum=0.1), FedDBE(start_mean="all"), FedDBE(start_epochs=0)):
        right.check(toy.task, toy.context)
    with pytest.raises(ConfigError, match="last layer's weight"):
        FedDBE().check(partly_fixed("head.weight"), toy_of(FedDBE()).context)


def test_rows_of_clients_sampled_and_never_sampled() -> None:
    toy = toy_of(FedDBE())
    for cohort in COHORTS:
        toy.step(cohort)
    assert set(toy.federation.trained_scores[1]["test"]) == {"local", "personalized"}
    scores = toy.scores()
    assert scores[3]["global"].vector.tolist() == scores[3]["personalized"].vector.tolist()
    for client in range(3):
        part, model = toy.dataset.load(client)["test"], toy.server["model"]
        inputs, logits = toy.task.network.head_inputs_and_logits(model, part.x)
        own = (inputs + toy.states()[client]["vector"]) @ model["head.weight"].T + model["head.bias"]
        assert abs(scores[client]["global"].loss - float(F.cross_entropy(logits, part.y))) < 1e-12
        assert abs(scores[client]["personalized"].loss - float(F.cross_entropy(own, part.y))) < 1e-12


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_vectorized_agrees_with_looped(momentum: float) -> None:
    algorithm = FedDBE(mean_momentum=momentum)
    looped, stacked = (toy_of(algorithm, task=two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_serves_clients_in_camps_with_other_classes() -> None:
    train = TRAIN.model_copy(update={"rounds": 20, "clients_per_round": "all", "local_epochs": 3})
    found = {}
    for algorithm, row in ((FedDBE(mean_weight=0.1), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, camps(), two_layers(10, 12, 6), train, mode="vectorized")
        toy.run()
        found[algorithm.name] = held_out_accuracy(toy, row)
    assert found["feddbe"] > found["fedavg"] + 0.03, found
