"""HierFAVG: invariants HIER of rounds, members of edges, weights of the cloud, special cases, and messages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from algorithms.fedavg import FedAvg
from algorithms.hierfavg import HierFAVG
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import steps
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10, 9, 3, 7)
COHORTS = ([0, 1, 2, 5], [1, 3], [0, 3, 4, 6], [2], [0, 1, 2, 3, 4, 5, 6])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)
BLOCKS = [0, 0, 0, 1, 1, 2, 2]
IN_TURN = [0, 1, 2, 0, 1, 2, 0]


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    data = options.pop("dataset", random_clients(SIZES))
    return Toy(algorithm, data, task or two_layers(), train, **options)


def mean(models: list[Tree], weights: list[int]) -> Tree:
    return {
        name: sum(w * model[name] for w, model in zip(weights, models, strict=True)) / sum(weights)
        for name in models[0]
    }


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("cloud_weights", ["all", "cohort"])
@pytest.mark.parametrize(("assignment", "belongs"), [("blocks", BLOCKS), ("in_turn", IN_TURN)])
def test_inv_hier_1_rounds_are_those_of_plain_loops(
    assignment: Any, belongs: list[int], cloud_weights: Any, aggregation: Any
) -> None:
    method = HierFAVG(
        edges=3, cloud_every=2, assignment=assignment, cloud_weights=cloud_weights, aggregation=aggregation
    )
    toy = toy_of(method)
    counts = list(SIZES) if aggregation == "samples" else [1] * len(SIZES)
    cloud: Tree = toy.server["model"]
    edges, trained_in = [cloud] * 3, [0] * 3
    for round, cohort in enumerate(COHORTS):
        trained = {k: steps(toy, edges[belongs[k]], k, round) for k in cohort}
        for edge in range(3):
            members = [k for k in cohort if belongs[k] == edge]
            if members:
                edges[edge] = mean([trained[k] for k in members], [counts[k] for k in members])
                trained_in[edge] += sum(counts[k] for k in members)
        if round in (1, 3):
            whole = [sum(counts[k] for k in range(7) if belongs[k] == edge) for edge in range(3)]
            cloud = mean(edges, whole if cloud_weights == "all" else trained_in)
            edges, trained_in = [cloud] * 3, [0] * 3
        toy.step(cohort)
        assert_close(toy.server["model"], cloud, 1e-12)
        assert_close(toy.server["edges"], {str(edge): model for edge, model in enumerate(edges)}, 1e-12)
    assert (toy.server.get("weights", {}) == {}) == (cloud_weights == "all")
    common, own = method.served(toy.server, toy.context)
    assert_equal(common, {"model": toy.server["model"]})
    for client, edge in enumerate(belongs):
        assert_equal(own[client]["edge"], toy.server["edges"][str(edge)])


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_inv_hier_2_one_edge_is_fedavg_whatever_the_cloud_does(aggregation: Any, task: Any) -> None:
    one, plain = (
        toy_of(algorithm, task=task())
        for algorithm in (HierFAVG(edges=1, aggregation=aggregation), FedAvg(aggregation=aggregation))
    )
    for cohort in COHORTS:
        assert_equal(one.step(cohort)["edges"], {"0": plain.step(cohort)["model"]})
    left, right = one.scores(), plain.scores()
    for client in range(len(SIZES)):
        assert left[client]["personalized"].vector.tolist() == right[client]["global"].vector.tolist()


@pytest.mark.parametrize("assignment", ["blocks", "in_turn", "random"])
@pytest.mark.parametrize("everyone", [True, False])
def test_inv_hier_3_with_a_cloud_in_every_round_it_is_fedavg(assignment: Any, everyone: bool) -> None:
    weights: Any = "all" if everyone else "cohort"
    cohorts = [list(range(len(SIZES)))] * 3 if everyone else COHORTS
    every = toy_of(HierFAVG(edges=3, cloud_every=1, assignment=assignment, cloud_weights=weights))
    plain = toy_of(FedAvg())
    for cohort in cohorts:
        assert_close(every.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)
        for edge in range(3):
            assert_equal(every.server["edges"][str(edge)], every.server["model"])


def test_inv_hier_4_without_a_cloud_each_edge_is_a_fedavg_of_its_own() -> None:
    toy = toy_of(HierFAVG(edges=3, cloud_every=9))
    start = copy(toy.server["model"])
    for cohort in COHORTS:
        toy.step(cohort)
    assert_equal(toy.server["model"], start)
    for edge in range(3):
        members = [k for k, of in enumerate(BLOCKS) if of == edge]
        alone = toy_of(FedAvg())
        for cohort in COHORTS:
            if chosen := [k for k in cohort if k in members]:
                alone.step(chosen)
            else:
                alone.round += 1
        assert_equal(toy.server["edges"][str(edge)], alone.server["model"])


@pytest.mark.parametrize("edges", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("assignment", ["blocks", "in_turn", "random"])
def test_inv_hier_5_edges_have_as_many_clients_each(assignment: Any, edges: int) -> None:
    toys = [toy_of(HierFAVG(edges=edges, assignment=assignment), seed=seed) for seed in (0, 0, 1, 2, 3)]
    found = [toy.algorithm.edges_of(toy.context) for toy in toys]  # type: ignore[attr-defined]
    for one in found:
        numbers = [one.count(str(edge)) for edge in range(edges)]
        assert sum(numbers) == len(SIZES) and max(numbers) - min(numbers) <= 1
    assert found[0] == found[1]
    drawn = assignment == "random" and edges > 1
    assert (len({tuple(one) for one in found}) > 1) == drawn


def test_the_mean_of_the_cloud_is_the_optimum_and_edges_go_to_that_of_their_clients() -> None:
    points = [-1.0, -3.0, 4.0, 6.0]
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=None, lr=0.2)
    toy = Toy(HierFAVG(cloud_every=60), quadratic_clients(points, [3, 1, 1, 1]), Quadratic(start=0.0), train)
    toy.run(59)
    assert abs(float(toy.server["edges"]["0"]["theta"]) + 1.5) < 1e-9
    assert abs(float(toy.server["edges"]["1"]["theta"]) - 5) < 1e-9
    toy.run(1)
    assert abs(float(toy.server["model"]["theta"]) - (4 * -1.5 + 2 * 5) / 6) < 1e-9


def test_a_round_and_a_cloud_without_anybody_change_nothing() -> None:
    for weights in ("all", "cohort"):
        toy = toy_of(HierFAVG(cloud_every=1, cloud_weights=weights))  # type: ignore[arg-type]
        before = copy(toy.server)
        after = toy.step([])
        assert_equal({key: after[key] for key in before}, before)


def test_an_edge_where_nobody_trained_counts_with_all_its_clients_or_with_none() -> None:
    whole, part = (
        toy_of(HierFAVG(edges=3, cloud_every=1, cloud_weights=weights))  # type: ignore[arg-type]
        for weights in ("all", "cohort")
    )
    start: Tree = copy(whole.server["model"])
    trained = mean([steps(whole, start, k, 0) for k in (0, 1)], [SIZES[0], SIZES[1]])
    assert_close(part.step([0, 1])["model"], trained, 1e-12)
    first, rest = sum(SIZES[:3]), sum(SIZES[3:])
    assert_close(whole.step([0, 1])["model"], mean([trained, start], [first, rest]), 1e-12)


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_stays_with_clients_also_where_an_edge_is_idle(policy: Any) -> None:
    toy = toy_of(HierFAVG(edges=3), TRAIN.model_copy(update={"private_norm": policy}), normalized_layers())
    for cohort in ([0, 1], [0, 2], [3], [6]):
        toy.step(cohort)
    for model in (toy.server["model"], *toy.server["edges"].values()):
        assert model["norm.running_mean"].numel() == 0
        assert (model["norm.weight"].numel() == 0) == (policy == "all")
    assert all(score["personalized"].loss > 0 for score in toy.scores().values())


def test_traffic_is_one_model_down_and_one_up() -> None:
    toy = toy_of(HierFAVG(edges=3), hosts=2)
    size = 8 * toy.task.network.num_parameters
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))


def test_newcomers_have_the_edge_that_fits_them_best_and_the_cloud() -> None:
    toy = toy_of(HierFAVG(edges=3, cloud_every=9), dataset=random_clients((*SIZES, 7, 5)), unseen=2)
    for cohort in COHORTS:
        toy.step(cohort)
    found = toy.scores(newcomers=True)
    for client in (7, 8):
        losses = []
        for model in toy.server["edges"].values():
            alone = toy.federation.evaluate(
                {"model": model, "edge": model}, ("test",), False, None, [client], newcomers=True
            )
            losses.append(alone[client]["test"]["personalized"].loss)
        assert found[client]["personalized"].loss == pytest.approx(min(losses), rel=1e-12)
        assert len(set(losses)) == 3


def test_fine_tuning_starts_from_the_edge() -> None:
    none, some = (toy_of(HierFAVG(finetune_epochs=epochs)) for epochs in (0, 3))
    for toy in (none, some):
        toy.run()
    kept, tuned = none.scores(final=True), some.scores(final=True)
    for client in range(len(SIZES)):
        assert kept[client]["finetuned"].vector.tolist() == kept[client]["personalized"].vector.tolist()
        assert tuned[client]["finetuned"].loss < tuned[client]["personalized"].loss


def test_more_edges_than_clients_are_refused_and_rounds_beyond_the_cloud_are_said() -> None:
    toy = toy_of(HierFAVG(edges=8))
    with pytest.raises(ConfigError, match=re.escape("algorithm.edges is 8, but only 7 clients")):
        toy.algorithm.check(toy.task, toy.context)
    (said,) = HierFAVG(cloud_every=6).remarks(toy.context)
    assert "the cloud never takes a mean" in said
    (said,) = HierFAVG(cloud_every=3).remarks(toy.context)
    assert said.startswith("the last 2 of 5 rounds follow the last mean of the cloud")
    for quiet in (HierFAVG(cloud_every=5), HierFAVG(edges=1, cloud_every=3)):
        assert quiet.remarks(toy.context) == ()


@pytest.mark.parametrize("double", [True, False])
def test_looped_and_vectorized_agree(double: bool) -> None:
    assert_modes_agree(HierFAVG(), (8, 12, 6, 10), TRAIN, double, 1e-10 if double else 1e-5)
