"""GPFL: invariants GP of valve, embeddings and losses, messages, and clients that label differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.gpfl import GPFL, SHARED, valve
from rayfl.engine.client import Client
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, copy, leaves, map_leaves
from rayfl.tasks.base import Batch, Task
from tests.support.gpfl_toys import Valve, drawn, example
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    planted_clients,
    take,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")


def test_the_valve_is_the_papers() -> None:
    _, toy, trained, _, frozen = example()
    features = drawn(5, 6, 7)
    expected = Valve(7, trained["valve"])(features, frozen["global"])
    assert_close(valve(trained["valve"], features, frozen["global"]), expected.detach(), 1e-12)
    # two linear layers within 1/sqrt(7), two normalizations, embeddings of variance 1
    for name in ("gamma", "beta"):
        first = toy.server["valve"][name]
        assert first["matrix"].abs().max() <= 7**-0.5 < 1.2 * first["matrix"].abs().max()
        assert (first["norm_gain"] == 1).all() and (first["norm_offset"] == 0).all()
    assert 0.5 < toy.server["embedding"].std() < 1.5


def test_inv_gp_1_of_equally_frequent_classes_both_conditions_are_one() -> None:
    toy = Toy(GPFL(), labelled([0, 1, 2, 2, 0, 1], [0, 0, 1]), two_layers(), TRAIN)
    even, other = (conditions(toy, client) for client in (0, 1))
    assert torch.equal(even[0], even[1]) and torch.equal(other[0], even[0])
    assert not torch.equal(other[1], even[0])
    features = drawn(5, 6, 7)
    opened = [valve(toy.server["valve"], features, condition) for condition in even]
    assert torch.equal(opened[0], opened[1])
    assert_close(other[1], (2 * toy.server["embedding"][0] + toy.server["embedding"][1]) / 3, 1e-12)


def conditions(toy: Toy, client: int, aggregated: bool = True) -> tuple[Tensor, Tensor]:
    """g and p_k of a client."""
    found: list[tuple[Tensor, Tensor]] = []

    class Asking(GPFL):
        async def ask(self, client: Any, embedding: Tensor) -> Tree:
            found.append(self.conditions(client, embedding, aggregated))
            return {}

    assert isinstance(toy.algorithm, GPFL)
    asking = Toy(Asking(**toy.algorithm.model_dump()), toy.dataset, toy.task, toy.train)
    for k, state in toy.states().items():
        asking.client_hosts[0].states.replace(k, state, 0)
    asking.federation.map(asking.algorithm.ask, [client], {"embedding": toy.server["embedding"]})  # type: ignore[attr-defined]
    return found[0]


def test_inv_gp_2_of_one_class_the_condition_is_its_embedding() -> None:
    toy = Toy(GPFL(), labelled([1, 1, 1], [2]), two_layers(), TRAIN)
    for client, label in ((0, 1), (1, 2)):
        assert torch.equal(conditions(toy, client)[1], toy.server["embedding"][label])
    assert not any(leaf.any() for leaf in conditions(toy, 0, aggregated=False))


class Unguided(GPFL):
    """Without the losses of global features."""

    def guidance(self, trained: Any, features: Tensor, batch: Batch, task: Task, frozen: Any) -> Tensor:
        return features.new_zeros(())


def test_inv_gp_3_behind_an_open_valve_it_is_fedper() -> None:
    shut = toy_of(Unguided(module_lr=0.0), task=two_layers())
    for name in ("gamma", "beta"):
        for leaf in (shut.server["valve"][name][key] for key in ("matrix", "offset", "norm_offset")):
            leaf.zero_()
    features = drawn(5, 6, 7).relu()
    assert torch.equal(valve(shut.server["valve"], features, drawn(6, 7)), features)
    plain = toy_of(FedPer(), task=two_layers())
    start = copy(shut.server)
    for cohort in COHORTS:
        assert_equal(shut.step(cohort)["shared"], plain.step(cohort)["shared"])
        assert_equal(shut.states(), plain.states())
        assert_equal(shut.server["valve"], start["valve"])
    assert vectors(shut.scores(), "personalized") == vectors(plain.scores(), "personalized")


def test_inv_gp_7_heads_stay_with_clients() -> None:
    toy = toy_of(GPFL(), task=two_layers())
    size = toy.task.network.num_parameters - 24 + 2 * (49 + 21) + 21
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * size, 8 * size))
    assert not any(path.startswith("head") or "/head" in path for path, _ in leaves(toy.server))
    assert {name for state in toy.states().values() for name in state["personal"]} == set(HEAD)


class Still(Unguided):
    """Trains the modules on nothing but their weight decay."""

    def _three_losses(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.head_inputs_and_logits(trained["model"], batch)[1]
        value: Tensor = task.cross_entropy(logits, batch)
        return value


def test_inv_gp_8_modules_stay_at_rate_0_and_shrink_by_weight_decay_alone() -> None:
    toy = toy_of(GPFL(module_lr=0.0, module_weight_decay=0.7), task=two_layers())
    start = copy(toy.server)
    for cohort in COHORTS:
        toy.step(cohort)
    for name in ("valve", "embedding"):
        assert_equal({name: toy.server[name]}, {name: start[name]})
    train = TRAIN.model_copy(update={"momentum": 0.0})
    toy = toy_of(Still(module_lr=0.2, module_weight_decay=0.5), train, two_layers())
    start = copy(toy.server)
    toy.step([0])
    # two epochs of two steps
    for name in ("valve", "embedding"):
        assert_close({name: toy.server[name]}, map_leaves(lambda leaf: leaf * 0.9**4, {name: start[name]}), 1e-12)


def test_conditions_open_with_the_first_aggregation_whatever_round_that_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], GPFL.conditions

    def spy(self: GPFL, client: Client, embedding: Tensor, aggregated: bool) -> tuple[Tensor, Tensor]:
        seen.append(aggregated)
        return original(self, client, embedding, aggregated)

    monkeypatch.setattr(GPFL, "conditions", spy)
    late, train = random_clients([8, 6, 5, 4]), TRAIN.model_copy(update={"clients_per_round": 2})
    toy = Toy(GPFL(), late, two_layers(), train, unseen=1)
    toy.round = 1  # nobody was there in round 0
    toy.step([0, 1])
    toy.step([0, 1])
    assert seen == [False, False, True, True]
    seen.clear()
    toy = Toy(GPFL(), late, two_layers(), train, unseen=1)
    toy.step([0, 1])
    toy.scores(newcomers=True)
    assert seen == [False, False, True, True]  # to join, and to be scored


@pytest.mark.parametrize("source", ["received", "own"])
def test_steps_are_those_of_one_optimizer_with_weight_decay_of_the_modules(source: Any) -> None:
    toy = toy_of(GPFL(guidance_weight=0.3, module_weight_decay=0.2, conditional_from=source), task=two_layers())
    part = toy.dataset.load(1)["train"]
    counts = F.one_hot(part.y, 3).double().sum(0)
    head, own = take(initial(toy), HEAD), None
    for round, cohort in enumerate(([1], [0, 1], [1])):
        server = copy({name: toy.server[name] for name in SHARED})
        base = server["embedding"] if own is None or source == "received" else own
        both, personal = (
            (torch.zeros(7, dtype=torch.float64),) * 2 if round == 0 else (base.mean(0), counts / 12 @ base)
        )
        model = {n: leaf.clone().requires_grad_() for n, leaf in {**server["shared"], **head}.items()}
        table, cov = server["embedding"].clone().requires_grad_(), Valve(7, copy(server["valve"]))
        groups = [
            {"params": list(model.values())},
            {"params": [table, *cov.parameters()], "weight_decay": 0.2},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=TRAIN.momentum, weight_decay=TRAIN.weight_decay)
        plan = plan_batches(12, 4, 6, toy.context.streams.generator("batches", round, 1))
        for index in plan.batches(CPU):
            x, y = part.x[index], part.y[index]
            features = toy.task.network.head_inputs_and_logits(model, x)[0]
            f_personal, f_global = cov(features, personal), cov(features, both)
            value = F.cross_entropy(f_personal @ model["head.weight"].T + model["head.bias"], y)
            similar = F.cosine_similarity(f_global[:, None], table[None], dim=-1)
            value = value + F.cross_entropy(similar, y) + 0.3 * torch.norm(f_global - server["embedding"][y], 2)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        head, own = {name: model[name].detach() for name in HEAD}, table.detach()
        toy.step(cohort)
        assert_close(toy.states()[1]["personal"], head, 1e-9)
        if cohort == [1]:
            assert_close(toy.server["embedding"], own, 1e-9)
            assert_close(toy.server["valve"]["beta"]["matrix"], cov.beta[0].weight.detach(), 1e-9)
            assert_close(toy.server["shared"], {n: model[n].detach() for n in server["shared"]}, 1e-9)


def test_evaluated_is_the_own_head_behind_the_latest_valve() -> None:
    toy = toy_of(GPFL(), task=two_layers())

    def expected(client: int, aggregated: bool) -> float:
        part = toy.dataset.load(client)["test"]
        counts = F.one_hot(part.y, 3).double().sum(0)
        condition = (counts / len(part) @ toy.server["embedding"]) * aggregated
        head = toy.states().get(client, {}).get("personal") or take(initial(toy), HEAD)
        features = toy.task.network.head_inputs_and_logits({**toy.server["shared"], **head}, part.x)[0]
        logits = valve(toy.server["valve"], features, condition) @ head["head.weight"].T + head["head.bias"]
        return float(F.cross_entropy(logits, part.y))

    for cohort in (None, *COHORTS):
        if cohort is not None:
            toy.step(cohort)
        for client, rows in toy.scores().items():
            assert set(rows) == {"personalized"}
            assert abs(rows["personalized"].loss - expected(client, cohort is not None)) < 1e-10


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(GPFL(), task=two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_personal_heads_serve_clients_that_label_differently() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((GPFL(), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["gpfl"] > accuracy["fedavg"] + 0.1, accuracy
