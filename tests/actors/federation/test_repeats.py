"""Clients that count more than once in the means of a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.parts.means import mean_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.params import Tree
from tests.support.cases import TRAIN
from tests.support.cases.base import SIZES
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

COHORT = [0, 1, 2]


def begun(hosts: int = 1, repeated: bool = True, repeats: dict[int, int] | None = None) -> Toy:
    clients = random_clients(SIZES, dtype=torch.float64)
    toy = Toy(FedAvg(aggregation="uniform"), clients, two_layers(double=True), TRAIN, hosts=hosts)
    toy.federation._context = replace(toy.context, repeats={} if repeated else None)
    toy.federation.begin_round(0, ("test",), COHORT, repeats=repeats)
    return toy


def mean(toy: Toy) -> Tree:
    return toy.algorithm.round(toy.server, COHORT, toy.federation)["model"]


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_client_weighs_as_often_as_it_was_drawn(hosts: int) -> None:
    toy = begun(hosts)
    sent = toy.federation.each(FedAvg().local_update, COHORT, {"model": toy.server["model"]})
    assert [one.weight for one in sent.values()] == [1, 1, 1]
    again = begun(hosts, repeats={1: 3})
    weighed = again.federation.each(FedAvg().local_update, COHORT, {"model": again.server["model"]})
    assert [one.weight for one in weighed.values()] == [1, 3, 1]
    expected = mean_of([Weighted(sent[client].tree) for client in (0, 1, 1, 1, 2)])
    assert_close(mean(begun(hosts, repeats={1: 3})), expected, atol=1e-14)


def test_the_next_round_has_no_repeats_of_the_last_one() -> None:
    toy = begun(repeats={1: 3})
    toy.federation.begin_round(0, ("test",), COHORT)
    assert_equal(mean(toy), mean(begun()))
    assert_equal(mean(begun(repeated=False, repeats={1: 3})), mean(begun()))
