"""FedBABU: invariants BABU, its row of the equivalence matrix, fine-tuning, what is refused, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedbabu import FedBABU
from algorithms.fedper import FedPer
from algorithms.local import Local
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    loss_of,
    planted_clients,
    take,
    three_layers,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_equal

HARD = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 0.3})
GROUPS = pytest.mark.parametrize("group", ["last_layer", "classifier_block"])


class HeadAtRest(FedPer):
    """FedPer whose head has the learning rate 0."""

    async def train_model(self, client: Client, model: Tree) -> Tree:
        rest = {name: ParameterGroup(lr=0.0) for name in self.head(client.task.network)}
        return await client.train(model, self.objective, groups=rest)


def tuned(toy: Toy, clients: list[int]) -> dict[int, Tree]:
    """The fine-tuned models of some clients after the last round."""
    assert isinstance(toy.algorithm, FedBABU)
    toy.federation.begin_round(toy.round - 1)
    return toy.federation.map(toy.algorithm.finetune, clients, {"model": served(toy)})


def served(toy: Toy) -> Tree:
    """(G, P_0)."""
    return {**toy.server["shared"], **toy.server["head"]}


@GROUPS
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_babu_1_the_head_stays_as_it_was_drawn(group: Any, mode: str) -> None:
    toy = toy_of(FedBABU(head_group=group), HARD, mode=mode)
    head = take(initial(toy), FedBABU(head_group=group).head(toy.task.network))
    for cohort in COHORTS:
        toy.step(cohort)
        assert_equal(toy.server["head"], head)
        assert not set(toy.server["shared"]) & set(head)
    toy.federation.begin_round(toy.round)
    trained = toy.federation.map(FedBABU.train_model, [0, 1, 2, 3], {"model": served(toy)})
    for model in trained.values():
        assert_equal(take(model, head), head)
        assert not torch.equal(model["inner.weight"], toy.server["shared"]["inner.weight"])
    assert toy.states() == {}


@GROUPS
@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_babu_2_is_fedper_with_a_head_at_rest(group: Any, task: Any) -> None:
    frozen, resting = (toy_of(method(head_group=group), HARD, task) for method in (FedBABU, HeadAtRest))
    for cohort in COHORTS:
        assert_equal(frozen.step(cohort)["shared"], resting.step(cohort)["shared"])
    for state in resting.states().values():
        assert_equal(state["personal"], frozen.server["head"])
    assert vectors(frozen.scores(), "global") == vectors(resting.scores(), "personalized")


def test_inv_babu_3_without_fine_tuning_the_personalized_model_is_the_global_one() -> None:
    toy = toy_of(FedBABU(finetune_epochs=0))
    for cohort in COHORTS:
        toy.step(cohort)
    scores = toy.scores(final=True)
    assert vectors(scores, "finetuned") == vectors(scores, "global")


def test_without_a_head_it_is_fedavg_with_fine_tuning() -> None:
    body, average = toy_of(FedBABU(head_group="none")), toy_of(FedAvg(finetune_epochs=5))
    for cohort in COHORTS:
        assert_equal(body.step(cohort)["shared"], average.step(cohort)["model"])
        assert body.federation.traffic == average.federation.traffic
    found, expected = body.scores(final=True), average.scores(final=True)
    for row in ("global", "finetuned"):
        assert vectors(found, row) == vectors(expected, row)


def test_evaluated_are_the_global_and_at_the_end_the_fine_tuned_model() -> None:
    toy = toy_of(FedBABU())
    for cohort in COHORTS:
        toy.step(cohort)
    assert all(list(rows) == ["global"] for rows in toy.scores().values())
    scores, models = toy.scores(final=True), tuned(toy, [0, 1, 2, 3])
    for client, rows in scores.items():
        assert abs(rows["global"].loss - loss_of(toy, served(toy), client)) < 1e-12
        assert abs(rows["finetuned"].loss - loss_of(toy, models[client], client)) < 1e-12
        # also client 3, which was never sampled
        assert rows["finetuned"].loss < rows["global"].loss
    assert toy.algorithm.personalized == "finetuned"


@GROUPS
@pytest.mark.parametrize("scope", ["full", "head", "body"])
def test_fine_tuning_moves_the_part_that_is_asked_for(group: Any, scope: Any) -> None:
    algorithm = FedBABU(head_group=group, finetune_scope=scope)
    toy = toy_of(algorithm)
    toy.step([0, 1])
    network = toy.task.network
    head, body = set(algorithm.head(network)), set(algorithm.body(network))
    moving = {"full": head | body, "head": head, "body": body}
    for client, model in tuned(toy, [1, 3]).items():
        start = served(toy)
        for name in network.parameter_names:
            assert torch.equal(model[name], start[name]) == (name not in moving[scope]), (client, name)


def test_defaults_are_five_epochs_of_the_whole_model() -> None:
    algorithm = FedBABU()
    assert (algorithm.finetune_epochs, algorithm.finetune_scope, algorithm.finetune_lr) == (5, "full", None)
    toy = toy_of(algorithm)
    algorithm.check(toy.task, toy.context)
    FedBABU(finetune_epochs=0, finetune_scope="head").check(toy.task, toy.context)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"head_group": "all"}, "head_group"), ({"head_group": "none", "finetune_scope": "head"}, "finetune_scope")],
)
def test_parts_without_parameters_are_refused(settings: dict[str, Any], field: str) -> None:
    toy = toy_of(FedBABU(**settings))
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} is {settings[field]}"):
        toy.algorithm.check(toy.task, toy.context)


@pytest.mark.slow
def test_learns_a_body_that_five_epochs_fit_to_every_client() -> None:
    """Clients with two of six classes and few samples: better than the global model, and than clients alone."""
    train = TRAIN.model_copy(update={"rounds": 30, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    data = planted_clients("classes", samples=15, classes=6)
    toys = {
        algorithm.name: Toy(algorithm, data, two_layers(12, 8, 6), train, mode="vectorized")
        for algorithm in (FedBABU(), Local())
    }
    for toy in toys.values():
        toy.run()
    accuracy = {row: held_out_accuracy(toys["fedbabu"], row, final=True) for row in ("global", "finetuned")}
    alone = held_out_accuracy(toys["local"], "personalized")
    assert accuracy["finetuned"] > accuracy["global"] + 0.2, accuracy
    assert accuracy["finetuned"] > alone + 0.03, (accuracy, alone)
