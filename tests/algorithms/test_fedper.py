"""FedPer: invariants PER, its rows of the equivalence matrix, what is evaluated, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.local import Local
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


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_per_1_nothing_personal_is_fedavg(task: Any, policy: Any) -> None:
    methods = FedPer(head_group="none", aggregation=policy), FedAvg(aggregation=policy)
    shared, average = (toy_of(algorithm, task=task) for algorithm in methods)
    for cohort in COHORTS:
        assert_equal(shared.step(cohort)["shared"], average.step(cohort)["model"])
        assert shared.states() == {}
    assert vectors(shared.scores(), "personalized") == vectors(average.scores(), "global")


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_per_2_everything_personal_is_local_only(task: Any, persist: bool) -> None:
    train = TRAIN.model_copy(update={"persist_optimizer": persist})
    personal, local = (toy_of(algorithm, train, task) for algorithm in (FedPer(head_group="all"), Local()))
    for cohort in COHORTS:
        personal.step(cohort)
        local.step(cohort)
        assert personal.server == {"shared": {}}
        assert personal.federation.traffic == local.federation.traffic
        for client, state in local.states().items():
            assert_equal(personal.states()[client]["personal"], state["local"])
    assert vectors(personal.scores(), "personalized") == vectors(local.scores(), "personalized")


@pytest.mark.parametrize("group", ["last_layer", "classifier_block", "none", "all"])
def test_inv_per_3_sent_and_kept_are_all_and_disjoint(group: Any) -> None:
    toy = toy_of(FedPer(head_group=group))
    toy.federation.begin_round(0)
    replies = toy.federation.map(FedPer.train_model, [1], {"model": initial(toy)})
    toy.step([1])
    sent, kept = set(toy.server["shared"]), set(toy.states().get(1, {}).get("personal", {}))
    assert sent | kept == set(initial(toy)) == set(replies[1])
    assert not sent & kept
    # together they are the model that the client trained
    assert_equal({**toy.server["shared"], **toy.states().get(1, {}).get("personal", {})}, replies[1])


def test_inv_per_4_a_head_changes_only_in_rounds_of_its_client() -> None:
    toy = toy_of(FedPer())
    heads: dict[int, Any] = {}
    for cohort in COHORTS:
        toy.step(cohort)
        now = {client: state["personal"] for client, state in toy.states().items()}
        for client, head in now.items():
            before = heads.get(client, take(initial(toy), head))
            same = all(torch.equal(head[name], before[name]) for name in head)
            assert same == (client not in cohort)
        heads = now
    assert set(heads) == {0, 1, 2}


@pytest.mark.parametrize("group", ["last_layer", "classifier_block"])
def test_inv_per_5_a_single_step_from_equal_heads_moves_the_body_as_fedavg(group: Any) -> None:
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None, "momentum": 0.0})
    personal, average = (toy_of(algorithm, train) for algorithm in (FedPer(head_group=group), FedAvg()))
    body = personal.step([0, 1, 2])["shared"]
    assert_equal(body, take(average.step([0, 1, 2])["model"], body))
    # from then on the heads differ
    body = personal.step([0, 1, 2])["shared"]
    assert not torch.equal(body["inner.weight"], average.step([0, 1, 2])["model"]["inner.weight"])


def test_evaluated_is_the_latest_body_with_the_own_head() -> None:
    toy = toy_of(FedPer())
    for cohort in COHORTS:
        toy.step(cohort)
    scores, states = toy.scores(final=True), toy.states()
    for client in range(4):
        head = states[client]["personal"] if client in states else take(initial(toy), ("head.weight", "head.bias"))
        assert list(scores[client]) == ["personalized"]
        assert abs(scores[client]["personalized"].loss - loss_of(toy, {**toy.server["shared"], **head}, client)) < 1e-12
    assert 3 not in states


def test_after_training_the_clients_own_model_is_published() -> None:
    toy = toy_of(FedPer())
    toy.step([1])
    trained = {**toy.server["shared"], **toy.states()[1]["personal"]}
    found = toy.federation.trained_scores[1]["test"]
    assert list(found) == ["local"]
    assert abs(found["local"].loss - loss_of(toy, trained, 1)) < 1e-12


def test_no_update_of_a_head_at_the_server() -> None:
    toy = toy_of(FedPer())
    toy.step([0, 1])
    assert toy.federation.updates.variance() is None


@pytest.mark.slow
def test_learns_a_common_representation_of_clients_that_label_differently() -> None:
    """One model cannot serve clients whose classes are permuted, and one client cannot learn the body alone."""
    train = TRAIN.model_copy(update={"rounds": 30, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((FedPer(), "personalized"), (FedAvg(), "global"), (Local(), "personalized")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedper"] > accuracy["local"] + 0.05, accuracy
    assert accuracy["local"] > accuracy["fedavg"] + 0.1, accuracy
