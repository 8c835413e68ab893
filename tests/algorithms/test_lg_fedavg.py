"""LG-FedAvg: invariants LG, its rows of the equivalence matrix, what is evaluated, and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.lg_fedavg import LGFedAvg
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
from tests.support.toys import Toy, assert_close, assert_equal


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_lg_1_everything_shared_is_fedavg(task: Any, policy: Any) -> None:
    shared, average = (
        toy_of(algorithm, task=task)
        for algorithm in (LGFedAvg(head_group="all", aggregation=policy), FedAvg(aggregation=policy))
    )
    for cohort in COHORTS:
        assert_equal(shared.step(cohort)["shared"], average.step(cohort)["model"])
        assert shared.federation.updates.variance() == average.federation.updates.variance()
        assert shared.states() == {}
    assert vectors(shared.scores(), "personalized") == vectors(average.scores(), "global")


@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_lg_2_nothing_shared_is_local_only(task: Any) -> None:
    private, local = (toy_of(algorithm, task=task) for algorithm in (LGFedAvg(head_group="none"), Local()))
    for cohort in COHORTS:
        private.step(cohort)
        local.step(cohort)
        assert private.server == {"shared": {}}
        for client, state in local.states().items():
            assert_equal(private.states()[client]["personal"], state["local"])
    assert vectors(private.scores(), "personalized") == vectors(local.scores(), "personalized")


@pytest.mark.parametrize("group", ["last_layer", "classifier_block", "none", "all"])
def test_inv_lg_3_complements_fedper(group: Any) -> None:
    """What one method sends the other keeps; both are a disjoint cover of the model."""
    sent, kept = {}, {}
    for method in (LGFedAvg, FedPer):
        toy = toy_of(method(head_group=group))
        toy.step([0, 1])
        sent[method] = set(toy.server["shared"])
        kept[method] = set(toy.states().get(0, {}).get("personal", {}))
        assert sent[method] | kept[method] == set(initial(toy))
        assert not sent[method] & kept[method]
    assert (sent[LGFedAvg], kept[LGFedAvg]) == (kept[FedPer], sent[FedPer])


@pytest.mark.parametrize("group", ["last_layer", "classifier_block"])
def test_inv_lg_4_bodies_of_clients_never_sampled_stay_initial(group: Any) -> None:
    toy = toy_of(LGFedAvg(head_group=group))
    for cohort in ([0, 1], [1], [0, 1]):
        toy.step(cohort)
    assert set(toy.states()) == {0, 1}
    body = take(initial(toy), LGFedAvg(head_group=group).body(toy.task.network))
    scores = toy.scores()
    for client in (2, 3):
        loss = loss_of(toy, {**body, **toy.server["shared"]}, client)
        assert abs(scores[client]["personalized"].loss - loss) < 1e-12
    # and they are sampled with it
    toy.federation.begin_round(3)
    start = toy.federation.map(LGFedAvg.train_model, [2, 3], {"model": {**body, **toy.server["shared"]}})
    replies = toy.step([2, 3])["shared"]
    sizes = [6, 10]
    for name, leaf in replies.items():
        assert_close(leaf, (sizes[0] * start[2][name] + sizes[1] * start[3][name]) / sum(sizes), 1e-12)
    for client in (2, 3):
        assert_equal(toy.states()[client]["personal"], take(start[client], body))


def test_a_body_changes_only_in_rounds_of_its_client() -> None:
    toy = toy_of(LGFedAvg())
    bodies: dict[int, Any] = {}
    for cohort in COHORTS:
        toy.step(cohort)
        now = {client: state["personal"] for client, state in toy.states().items()}
        for client in set(now) - set(cohort):
            assert_equal(now[client], bodies[client])
        for client in cohort:
            before = bodies.get(client, initial(toy))
            assert not torch.equal(now[client]["inner.weight"], before["inner.weight"])
        bodies = now


def test_evaluated_is_the_own_body_with_the_latest_head() -> None:
    toy = toy_of(LGFedAvg())
    for cohort in COHORTS:
        toy.step(cohort)
    scores, states = toy.scores(final=True), toy.states()
    for client in (0, 1, 2):
        model = {**states[client]["personal"], **toy.server["shared"]}
        assert list(scores[client]) == ["personalized"]
        assert abs(scores[client]["personalized"].loss - loss_of(toy, model, client)) < 1e-12


def test_uniform_is_the_plain_mean_of_the_heads() -> None:
    toy = toy_of(LGFedAvg(aggregation="uniform"))
    toy.federation.begin_round(0)
    trained = toy.federation.map(LGFedAvg.train_model, [0, 1], {"model": initial(toy)})
    for name, leaf in toy.step([0, 1])["shared"].items():
        assert_close(leaf, (trained[0][name] + trained[1][name]) / 2, 1e-12)


def test_variance_of_updates_is_that_of_the_heads() -> None:
    toy = toy_of(LGFedAvg())
    toy.federation.begin_round(0)
    trained = toy.federation.map(LGFedAvg.train_model, [0, 1], {"model": initial(toy)})
    toy.step([0, 1])
    heads = [torch.cat([trained[k][name].flatten() for name in ("head.weight", "head.bias")]) for k in (0, 1)]
    found = toy.federation.updates.variance()
    assert found is not None
    assert np.isclose(found, 0.5 * float(((heads[0] - heads[1]) ** 2).sum()), rtol=1e-9)


@pytest.mark.slow
def test_learns_where_clients_see_their_inputs_in_an_order_of_their_own() -> None:
    """No common body can serve permuted inputs; of the model only the head travels."""
    train = TRAIN.model_copy(update={"rounds": 25, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy, traffic = {}, {}
    for algorithm, row in ((LGFedAvg(), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, planted_clients("body", samples=60), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        traffic[algorithm.name] = toy.federation.traffic.up
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["lg_fedavg"] > accuracy["fedavg"] + 0.2, accuracy
    assert traffic["lg_fedavg"] < traffic["fedavg"] / 3
