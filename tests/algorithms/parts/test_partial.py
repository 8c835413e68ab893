"""Shared and personal parts: the cut, its extremes, running statistics, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.fedbabu import FedBABU
from algorithms.fedper import FedPer
from algorithms.fedrep import FedRep
from algorithms.lg_fedavg import LGFedAvg
from algorithms.parts.partial import PartialModel
from rayfl.errors import ConfigError
from rayfl.params import copy, from_leaves, leaves
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, take, three_layers, toy_of, vectors
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

METHODS = (FedPer, LGFedAvg, FedRep, FedBABU)
GROUPS = ("last_layer", "classifier_block", "none", "all")
BODY = ("inner.weight", "inner.bias", "norm.weight", "norm.bias")
BUFFERS = ("norm.running_mean", "norm.running_var")
BLOCK = ("hidden.weight", "hidden.bias")
HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("group", "body", "head"),
    [
        ("last_layer", {*BODY, *BUFFERS, *BLOCK}, {*HEAD}),
        ("classifier_block", {*BODY, *BUFFERS}, {*BLOCK, *HEAD}),
        ("none", {*BODY, *BUFFERS, *BLOCK, *HEAD}, set()),
        ("all", set(), {*BODY, *BUFFERS, *BLOCK, *HEAD}),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_the_cut(method: type[PartialModel], group: Any, body: set[str], head: set[str]) -> None:
    network, algorithm = three_layers().network, method(head_group=group)
    assert set(algorithm.body(network)) == body
    assert set(algorithm.head(network)) == head
    shared = head if method is LGFedAvg else body
    assert set(algorithm.shared(network)) == shared
    assert set(algorithm.personal(network)) == (body | head) - shared


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", METHODS)
def test_the_server_starts_with_its_part_of_the_initial_model(method: type[PartialModel], group: Any) -> None:
    toy = toy_of(method(head_group=group))
    names = toy.algorithm.shared(toy.task.network)  # type: ignore[attr-defined]
    assert_equal(toy.server["shared"], take(initial(toy), names))
    assert set(toy.server) == ({"shared", "head"} if method is FedBABU else {"shared"})


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.two_cases
def test_a_part_without_tensors_may_be_lost_in_storage(method: type[PartialModel], group: Any) -> None:
    """A stored tree has no empty parts."""
    plain, restored = (toy_of(method(head_group=group)) for _ in range(2))
    for cohort in COHORTS[:2]:
        restored.server = from_leaves(dict(leaves(restored.server)))
        plain.step(cohort)
        restored.step(cohort)
    restored.server = from_leaves(dict(leaves(restored.server)))
    expected, found = plain.scores(), restored.scores()
    row = "global" if method is FedBABU else "personalized"
    assert vectors(found, row) == vectors(expected, row)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.two_cases
def test_vectorized_agrees_with_looped(method: type[PartialModel], group: Any) -> None:
    looped, stacked = (
        toy_of(method(head_group=group), task=two_layers(), mode=mode) for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())


@pytest.mark.parametrize("group", GROUPS[:3])
@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_follow_the_body(method: type[PartialModel], group: Any) -> None:
    toy = toy_of(method(head_group=group))
    before = initial(toy)
    toy.step([0, 1])
    if method is LGFedAvg:
        found = [toy.states()[client]["personal"] for client in (0, 1)]
        assert not set(BUFFERS) & set(toy.server["shared"])
        assert not (found[0][BUFFERS[0]] == found[1][BUFFERS[0]]).all()
    else:
        found = [toy.server["shared"]]
        assert not any(set(BUFFERS) & set(state.get("personal", {})) for state in toy.states().values())
    for name in BUFFERS:
        assert all((tree[name] - before[name]).abs().max() > 1e-4 for tree in found)


@pytest.mark.parametrize("method", METHODS)
def test_clients_of_one_host_do_not_share_running_statistics(method: type[PartialModel]) -> None:
    """Training records them in the tensors it is given, and all clients of a host receive the same tensors."""
    together, alone = toy_of(method()), toy_of(method())
    together.federation.begin_round(0)
    replies = together.federation.map(together.algorithm.train_model, [0, 1, 2], {"model": initial(together)})  # type: ignore[attr-defined]
    for client in (2, 1, 0):
        alone.federation.begin_round(0)
        reply = alone.federation.map(alone.algorithm.train_model, [client], {"model": initial(alone)})  # type: ignore[attr-defined]
        assert_equal(reply[client], replies[client])


@pytest.mark.parametrize("method", METHODS)
def test_population_keeps_the_mass_of_clients_not_sampled(method: type[PartialModel]) -> None:
    """Of a cohort with half of all samples the server takes half the step, in the shared part."""
    sampled, population = (
        Toy(method(aggregation=policy), random_clients((8, 8, 8, 8)), two_layers(), TRAIN)
        for policy in ("samples", "population")
    )
    before = copy(sampled.server["shared"])
    whole, half = sampled.step([0, 3])["shared"], population.step([0, 3])["shared"]
    assert_close(half, {name: (before[name] + whole[name]) / 2 for name in before}, 1e-12)
    assert any((whole[name] != before[name]).any() for name in before)


@pytest.mark.parametrize("group", ["last_layer", "classifier_block"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_body_is_refused(method: type[PartialModel], group: Any) -> None:
    toy = Toy(method(head_group=group), random_clients(SIZES), softmax_regression(), TRAIN)
    with pytest.raises(ConfigError, match=r"algorithm\.head_group is .*no body"):
        toy.algorithm.check(toy.task, toy.context)
    toy.algorithm.check(three_layers(), toy.context)


@pytest.mark.parametrize("method", METHODS)
def test_defaults(method: type[PartialModel]) -> None:
    algorithm = method()
    assert (algorithm.head_group, algorithm.aggregation) == ("last_layer", "samples")
