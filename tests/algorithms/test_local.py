"""Local only: invariants LOC, both schedules, and how little federation there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedproto import FedProto
from algorithms.local import Local
from algorithms.superfed import SuPerFed
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01
)
ALL = TRAIN.model_copy(update={"clients_per_round": "all"})
SCHEDULES = pytest.mark.parametrize(("schedule", "train"), [("sampled", TRAIN), ("all", ALL)])


def toy(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def own(run: Toy, client: int) -> Tree:
    model: Tree = run.states()[client]["local"]
    return model


@SCHEDULES
def test_inv_loc_1_a_client_does_not_depend_on_the_others(schedule: Any, train: TrainConfig) -> None:
    plain = toy(Local(schedule=schedule), train)
    pairs = [plain.dataset.load(client)["train"] for client in range(4)]
    others = ListDataset([(pairs[0].x, pairs[0].y), *((-3 * part.x, (part.y + 1) % 3) for part in pairs[1:])])
    changed = Toy(Local(schedule=schedule), others, two_layers(), train)
    for _ in range(train.rounds):
        cohort = None if schedule == "all" else [0, 2]
        plain.step(cohort)
        changed.step(cohort)
    assert_equal(changed.states()[0], plain.states()[0])
    found, expected = (run.scores()[0]["personalized"].vector for run in (changed, plain))
    assert found.tolist() == expected.tolist()
    assert not torch.equal(own(changed, 2)["head.weight"], own(plain, 2)["head.weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_inv_loc_2_all_rounds_are_one_long_run_of_sgd(momentum: float) -> None:
    train = ALL.model_copy(update={"momentum": momentum})
    run = toy(Local(schedule="all"), train)
    task, client = run.task, 1
    examples = run.dataset.load(client)["train"]
    start = task.network.initialize(run.context.streams.integer("init.global"))
    parameters = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=momentum, weight_decay=0.01)
    for round in range(train.rounds):
        plan = plan_batches(12, 4, 6, run.context.streams.generator("batches", round, client))
        for index in plan.batches(CPU):
            optimizer.zero_grad()
            logits = task.network.logits(parameters, examples.x[index])
            torch.nn.functional.cross_entropy(logits, examples.y[index]).backward()
            optimizer.step()
        run.step()
        assert_close(own(run, client), {name: leaf.detach() for name, leaf in parameters.items()}, 1e-12)


@SCHEDULES
@pytest.mark.parametrize("init", ["shared", "own"])
def test_inv_loc_3_nothing_is_sent(schedule: Any, init: Any, train: TrainConfig) -> None:
    run = toy(Local(schedule=schedule, local_init=init), train, hosts=2)
    for _ in range(train.rounds):
        assert run.step() == {}
        assert (run.federation.traffic.down, run.federation.traffic.up) == (0, 0)
        trained = run.federation.trained_scores
        assert set(trained) == set(run.cohort(run.round - 1))
        assert all(set(splits["test"]) == {"personalized"} for splits in trained.values())


def test_sampled_rounds_start_with_empty_momentum() -> None:
    run = toy(Local())
    model = run.task.network.initialize(run.context.streams.integer("init.global"))
    for _ in range(3):
        # a round of federated averaging of this one client, from its own model
        alone = toy(FedAvg())
        alone.round, alone.server = run.round, {"model": model}
        model = copy(alone.step([1])["model"])
        run.step([1])
        assert_equal(run.states(), {1: {"local": model}})


def test_persist_optimizer_keeps_momentum_in_sampled_rounds_too() -> None:
    kept = toy(Local(), TRAIN.model_copy(update={"persist_optimizer": True}))
    everyone = toy(Local(schedule="all"), ALL)
    for _ in range(2):
        assert_equal(kept.step([0, 1, 2, 3]), everyone.step())
        assert_equal(kept.states(), everyone.states())
    assert_equal(kept.states()[0]["optimizer"]["main"].keys(), two_layers().network.initialize(0).keys())


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_sampled_is_superfed_at_coefficient_one(make: Any) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    mixing = SuPerFed(start=0.0, fixed_coefficient=1.0, orthogonality_weight=0.0, proximal_weight=0.0)
    alone, mixed = toy(Local(local_init="own"), train, make()), toy(mixing, train, make())
    parameters = alone.task.network.parameter_names
    for _ in range(train.rounds):
        alone.step()
        mixed.step()
        for client, state in mixed.states().items():
            for name in parameters:  # running statistics are those of w^f in SuPerFed
                torch.testing.assert_close(own(alone, client)[name], state["local"][name], rtol=0, atol=1e-12)
    assert set(alone.states()) == set(mixed.states())


@pytest.mark.parametrize("init", ["shared", "own"])
def test_clients_never_sampled_have_their_initial_model(init: Any) -> None:
    run = toy(Local(local_init=init))
    run.step([0, 1])
    rows = run.scores()
    untrained = Toy(Local(local_init=init), run.dataset, run.task, run.train).scores()
    for client in range(4):
        same = rows[client]["personalized"].vector.tolist() == untrained[client]["personalized"].vector.tolist()
        assert same == (client > 1)
    assert set(run.states()) == {0, 1}


def test_own_initial_models_differ_and_shared_ones_are_that_of_federated_averaging() -> None:
    idle = ALL.model_copy(update={"lr": 0.0})
    shared, drawn = (toy(Local(schedule="all", local_init=init), idle) for init in ("shared", "own"))  # type: ignore[arg-type]
    shared.step()
    drawn.step()
    for client in range(4):
        assert_equal(own(shared, client), toy(FedAvg()).server["model"])
        others = [own(drawn, other)["head.weight"] for other in range(4) if other != client]
        others.append(own(shared, client)["head.weight"])
        assert not any(torch.equal(own(drawn, client)["head.weight"], other) for other in others)


def test_quadratic_closed_form() -> None:
    points, eta, epochs, rounds = [0.0, 4.0, 10.0], 0.1, 2, 3
    train = TrainConfig(rounds=rounds, clients_per_round="all", local_epochs=epochs, batch_size=None, lr=eta)
    run = Toy(Local(schedule="all"), quadratic_clients(points, [1, 3, 2]), Quadratic(start=1.0), train)
    run.run()
    for client, point in enumerate(points):
        expected = point + (1 - eta) ** (epochs * rounds) * (1.0 - point)
        assert abs(float(own(run, client)["theta"]) - expected) < 1e-12


def test_schedule_all_needs_everybody() -> None:
    some, everyone = toy(Local(), TRAIN), toy(Local(), ALL)
    with pytest.raises(ConfigError, match=r"schedule is all.*set train\.clients_per_round=all"):
        Local(schedule="all").check(some.task, some.context)
    Local(schedule="all").check(everyone.task, everyone.context)
    Local(schedule="sampled").check(some.task, some.context)


@SCHEDULES
def test_vectorized_agrees_with_looped(schedule: Any, train: TrainConfig) -> None:
    looped, stacked = (toy(Local(schedule=schedule), train, mode=mode) for mode in ("looped", "vectorized"))
    looped.run()
    stacked.run()
    assert_close(looped.states(), stacked.states())


def test_clients_of_several_architectures_train_those_that_other_methods_give_them() -> None:
    single = two_layers()
    pair = Classification(single.network, [single, normalized_layers()])
    alone, together = (
        Toy(algorithm, random_clients((8, 12, 6, 10, 9, 7)), pair, TRAIN, mode="vectorized")
        for algorithm in (Local(), FedProto(alignment_weight=0))
    )
    for run in (alone, together):
        run.step(range(6))
    found = alone.states()
    assert len({tuple(state["local"]) for state in found.values()}) == 2
    assert_close(found, together.states())
    losses = {client: rows["head"].loss for client, rows in together.scores().items()}
    assert {client: rows["personalized"].loss for client, rows in alone.scores().items()} == pytest.approx(losses)
    with pytest.raises(ConfigError, match=r"algorithm\.local_init is own"):
        Local(local_init="own").check(pair, alone.context)


def test_where_clients_disagree_local_models_beat_the_common_one() -> None:
    """Two groups of clients label the same inputs in opposite ways: no common model can serve both."""
    generator = torch.Generator().manual_seed(5)
    clients = []
    for client in range(4):
        x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
        y = (x[:, 0] > 0).long()
        clients.append((x, y if client % 2 else 1 - y))
    train = TrainConfig(rounds=8, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.5)
    alone, common = (
        Toy(algorithm, ListDataset(clients, classes=2), two_layers(classes=2), train)
        for algorithm in (Local(schedule="all"), FedAvg())
    )
    alone.run()
    common.run()
    found = {name: run.scores() for name, run in (("personalized", alone), ("global", common))}
    accuracy = {name: [rows[name].top1 for rows in scores.values()] for name, scores in found.items()}
    assert min(accuracy["personalized"]) > 0.9
    assert max(accuracy["global"]) < 0.8
